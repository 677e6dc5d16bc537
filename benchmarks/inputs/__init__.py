"""The prompts of benchmark runs."""

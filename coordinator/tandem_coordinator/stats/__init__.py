"""Counts of what speculation did, and the rates that MAX and vLLM users know."""

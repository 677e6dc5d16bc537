"""From a completion's rounds to the chunks that its client takes."""

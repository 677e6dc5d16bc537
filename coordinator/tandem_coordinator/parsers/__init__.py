"""Parsers of completions: forms in which models write calls of tools and reasoning, and how they are read."""

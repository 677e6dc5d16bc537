"""Drafting heads beside their target."""

"""Drafting heads: small modules that read a target's hidden states, from published checkpoints; one file per method."""

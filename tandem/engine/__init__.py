"""Runs a Hugging Face model for many sequences at once, with tokens that can be taken back.

The only part of `tandem` that imports torch. `tandem.engine.models.checkpoint` does not, so that a wrong folder is
reported at once. Import all modules here by their full names.
"""

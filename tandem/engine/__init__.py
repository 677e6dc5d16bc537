"""Runs a Hugging Face model for many sequences at once, with tokens that can be taken back.

The only part of `tandem` that imports torch. `tandem.engine.checkpoint` does not, so that a wrong folder is told
of at once; import it, and everything else here, by module.
"""

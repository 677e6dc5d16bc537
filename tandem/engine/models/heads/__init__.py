"""Drafting heads: small modules that read a target's hidden states, from their published checkpoints.

One file per method. Imported by the engine's backends and by services; imports the rest of `tandem.engine.models`.
"""

"""A target's hidden states: taken out of its steps, kept with its keys and values, read by a drafting head.

Imported by services; imports `tandem.engine.models` and the KV cache.
"""

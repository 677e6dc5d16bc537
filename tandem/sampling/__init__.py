"""Keyed noise and warping: one definition each for numpy and torch.

Imported by the coordinator and by both services; imports `tandem.types` and, for the ranges, `tandem.config.rule`.
"""

"""Keyed noise and warping: one definition each for numpy and torch."""

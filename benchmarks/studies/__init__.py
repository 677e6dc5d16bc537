"""Measurements beside the yardstick, each a command of its own; their results are in `results/`."""

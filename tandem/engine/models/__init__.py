"""Loads a checkpoint folder into a module whose attention is ours."""

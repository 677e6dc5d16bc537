"""Loads a checkpoint folder into a module whose attention is ours.

Backends and the core import it; it imports `kv_cache`, never a backend.
"""

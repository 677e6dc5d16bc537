"""Counts of what speculation did, and the rates that MAX and vLLM users know.

Imported from everywhere in the coordinator; imports none of its packages.
"""

"""Tandem inside other engines. Stands above the coordinator's `replicas` and `transport`, which it shares.

Nothing imports it, so that an engine's change reaches no service of ours (docs/architecture.md).
"""

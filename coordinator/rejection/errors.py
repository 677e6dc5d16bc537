"""Errors that precede an acceptance decision. Pure functions raise them; callers map them to gRPC codes."""

from __future__ import annotations


class RuleError(ValueError):
    """Options that do not go together. The message is one sentence for a user."""


class RowError(ValueError):
    """A draft or a target said something that the rule cannot work with: a fault of that service."""

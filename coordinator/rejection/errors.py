"""What can go wrong before a rule decides anything. Pure functions raise these; the callers know the gRPC code."""

from __future__ import annotations


class RuleError(ValueError):
    """Options that do not go together. The message is one sentence for a user."""


class RowError(ValueError):
    """A draft or a target said something that the rule cannot work with: a fault of that service."""

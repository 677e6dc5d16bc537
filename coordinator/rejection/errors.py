"""Errors of acceptance rules. Pure functions raise them; callers map them to gRPC status codes."""

from __future__ import annotations


class RuleError(ValueError):
    """The options conflict. The message is one sentence for a user."""


class RowError(ValueError):
    """A draft or a target answered with rows that the rule cannot use: a fault of that service."""

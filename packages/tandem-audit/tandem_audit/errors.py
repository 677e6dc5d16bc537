"""Errors of an audit, each with the exit code of the command. Messages are one sentence for a user."""

from __future__ import annotations

from typing import ClassVar


class AuditError(Exception):
    """Anything that an audit raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(AuditError):
    """The command or its options are wrong."""

    exit_code = 2


class UnreachableError(AuditError):
    """A server cannot be reached, or cannot serve now."""

    exit_code = 4


class RefusedError(AuditError):
    """A server refuses who asks, or how much is asked."""

    exit_code = 5


class InvalidRequestError(RefusedError):
    """A server refuses what is asked, and would refuse it again."""


class AnswerError(AuditError):
    """A server's answer is not what OpenAI's API says, or does not come."""


class BudgetError(AuditError):
    """The audit has used what it was allowed to."""

"""The running request as failover sees it."""

from __future__ import annotations

from typing import Protocol


class ServedRequest(Protocol):
    """Records which replicas serve it, and knows how many tokens it has."""

    draft_address: str | None
    """Address of the draft that proposes for it now; None without one."""
    target_address: str | None
    """Address of the target that verifies for it now; None before the first."""

    @property
    def completion_tokens(self) -> int:
        """Number of tokens committed so far."""

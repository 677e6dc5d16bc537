"""Administration of a coordinator, as AdminService calls it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Protocol

from tandem.admin import ConfigOption, Diagnosis, RequestReport, Stats, Status
from tandem.replica import ReplicaSnapshot


class Administrator(Protocol):
    """Shows and steers a coordinator: one process, or several that share a port. `Administration` has the details."""

    async def status(self) -> Status:
        """How the coordinator does."""

    async def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        """Send no new sequences to a replica."""

    async def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        """Give a replica new sequences again."""

    async def requests(self) -> list[RequestReport]:
        """The requests that run, the oldest first."""

    async def request(self, request_id: str) -> RequestReport:
        """The request whose id begins like this."""

    async def abort(self, request_id: str, *, reason: str, by: str) -> RequestReport:
        """End the request whose id begins like this."""

    async def stats(self) -> Stats:
        """Counts since the start."""

    def watch(self, interval_seconds: float) -> AsyncGenerator[Stats]:
        """Statistics at a fixed interval."""

    async def config(self) -> list[ConfigOption]:
        """Every option with its value and its origin."""

    async def update_config(
        self, values: Mapping[str, str], reset: Collection[str], *, by: str
    ) -> list[ConfigOption]:
        """Change options for new requests."""

    async def diagnose(self) -> Diagnosis:
        """Findings, each with what to do about it."""

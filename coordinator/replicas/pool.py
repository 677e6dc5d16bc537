"""The replicas of one role: finds them by address or name, follows each, and chooses the least busy one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Generic

from coordinator.replicas.means import ClientT
from coordinator.replicas.member import Member
from tandem.errors import InvalidRequestError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.rpc.resolver import Address, Resolver, joined
from tandem.types import SpeculationStats

logger = logging.getLogger(__name__)

_GONE = "its name no longer stands for this address"


class Pool(Generic[ClientT]):
    """Keeps in touch with every replica of one role."""

    def __init__(
        self,
        role: Role,
        addresses: Sequence[Address],
        make_member: Callable[[str, Address, Callable[[], None]], Member[ClientT]],
        resolver: Resolver,
        resolve_interval_seconds: float,
    ) -> None:
        self.role = role
        self.addresses = addresses
        """The addresses as configured."""
        self._make_member = make_member
        self._resolver = resolver
        self._resolve_interval_seconds = resolve_interval_seconds
        self._members: dict[str, Member[ClientT]] = {}
        self._unresolved: dict[Address, str] = {}
        self._drained: dict[str, str] = {}
        """Reasons for which operators drained addresses. A drain lasts until somebody resumes the address, even
        while its name omits it."""
        self._missed: set[str] = set()
        """Members that their name did not include at the last resolution."""
        self._changed = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the replicas, and begin to follow them. This waits only for the first resolution of names."""
        await self.look()
        if any(address.is_name for address in self.addresses):
            self._refreshing = asyncio.create_task(self._keep_refreshing())

    async def close(self) -> None:
        """Close all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self._members.values()))

    @property
    def members(self) -> list[Member[ClientT]]:
        """Every known replica, in any state."""
        return [*self._members.values()]

    def member(self, address: str) -> Member[ClientT] | None:
        """The replica with that address, as snapshots spell it."""
        return self._members.get(address)

    def drain(self, address: str, reason: str) -> None:
        """Send no new sequences to this address until it is resumed, even if another replica takes it over.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        self._known(address).drain(reason)
        self._drained[address] = reason

    def resume(self, address: str) -> None:
        """Send new sequences to this address again, if its name still includes it.

        Raises:
            InvalidRequestError: there is no such replica.
        """
        member = self._known(address)
        self._drained.pop(address, None)
        if address in self._missed:
            member.drain(_GONE)
        else:
            member.resume()

    def _known(self, address: str) -> Member[ClientT]:
        member = self.member(address)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise InvalidRequestError(
                f"there is no {self.role.value} replica {address!r}; there are: {known}"
            )
        return member

    def snapshots(self) -> list[ReplicaSnapshot]:
        """Every replica, and every name without an address."""
        unresolved = [_unresolved(self.role, address, why) for address, why in self._unresolved.items()]
        return [member.snapshot() for member in self.members] + unresolved

    def choose(self, avoid: Collection[Member[ClientT]] = ()) -> Member[ClientT] | None:
        """The least busy ready replica that is not to be avoided; None without one."""
        ready = [member for member in self.members if member.is_ready and member not in avoid]
        return min(ready, key=lambda member: (member.open_sequences, member.step.value or 0.0), default=None)

    async def chosen(self, seconds: float, avoid: Collection[Member[ClientT]] = ()) -> Member[ClientT] | None:
        """Wait for a ready replica and choose it; None when there is none in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (member := self.choose(avoid)) is None:
                    await self.change()
                return member
        return None

    async def change(self) -> None:
        """Return when the state of any replica has changed."""
        await self._changed.wait()

    def reasons(self) -> str:
        """Reasons why none is ready, replica by replica."""
        lines = [f"{shot.address} is {shot.state.value} ({shot.reason})" for shot in self.snapshots()]
        return "; ".join(lines) or "none is configured"

    def _notify_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_interval_seconds)
            await self.look()

    async def look(self) -> None:
        """Resolve each name; follow new addresses, and drop missing ones that have no sequences left."""
        wanted: dict[str, Address] = {}
        for address in self.addresses:
            for found in await self._resolved(address):
                wanted.setdefault(found, address)
        for found, address in wanted.items():
            self._keep(found, address)
        for gone in self._members.keys() - wanted.keys():
            await self._leave(gone)

    async def _resolved(self, address: Address) -> list[str]:
        if not address.is_name:
            return [str(address)]
        try:
            hosts = await self._resolver(address.host, address.port)
        except OSError as error:
            # The known addresses may still work: a failing name server ends nothing.
            kept = [found for found, member in self._members.items() if member.origin == address]
            if not kept:
                self._unresolved[address] = f"its name cannot be resolved: {error.strerror or error}"
            return kept
        self._unresolved.pop(address, None)
        return [joined(host, address.port) for host in hosts]

    def _keep(self, found: str, address: Address) -> None:
        self._missed.discard(found)
        member = self._members.get(found)
        if member is None:
            member = self._members[found] = self._make_member(found, address, self._notify_change)
            if found in self._drained:
                member.drain(self._drained[found])
            member.start()
        elif member.drained_because == _GONE:
            member.resume()

    async def _leave(self, gone: str) -> None:
        """Send no new sequences to it, and drop it at the next resolution unless its name includes it again."""
        member = self._members[gone]
        if gone not in self._missed:
            self._missed.add(gone)
            if not member.drained_because:
                member.drain(_GONE)
        elif member.open_sequences == 0:
            del self._members[gone]
            self._missed.discard(gone)
            await member.close()
            logger.info("replica dropped", extra={"role": self.role.value, "address": gone})


def _unresolved(role: Role, address: Address, reason: str) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        role, str(address), ReplicaState.DOWN, reason, 0.0, 0, None, None, SpeculationStats(), None
    )

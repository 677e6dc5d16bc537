"""The tokens that a service already has, so that each message carries only the difference."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.types import Delta, common_length


class RemoteSequence:
    """The tokens on the other side of a stream, as far as the coordinator knows them.

    Committed tokens never change, so only those past the last known agreement are kept and compared.
    """

    def __init__(self) -> None:
        self._agreed = 0
        self._tail: list[int] = []

    @property
    def length(self) -> int:
        return self._agreed + len(self._tail)

    def kept_length(self, committed: Sequence[int]) -> int:
        """How many tokens, from the first on, the service holds and the coordinator committed."""
        return self._agreed + common_length(self._tail, committed[self._agreed :])

    def delta_to(self, committed: Sequence[int], proposed: Sequence[int] = ()) -> Delta:
        """The change that makes the service hold the committed tokens and then the proposed ones."""
        wanted = [*committed[self._agreed :], *proposed]
        matched = common_length(self._tail, wanted)
        delta = Delta(self._agreed + matched, wanted[matched:])
        # Proposed tokens may yet be rejected: the agreement to rely on ends where they begin.
        agreed = min(delta.base_length, len(committed))
        self._tail = wanted[agreed - self._agreed :]
        self._agreed = agreed
        return delta

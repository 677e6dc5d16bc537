"""Admission of sequences: so many may be open at once, shared fairly among clients."""

from __future__ import annotations

from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.page_table import PageTable
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.settings import EngineSettings
from tandem.errors import CapacityError, ServiceUnavailableError
from tandem.fair_places import FairPlaces


class Admission:
    """Counts the open sequences. Lives on the event loop's thread and is touched from nowhere else."""

    def __init__(self, settings: EngineSettings, vocabulary_size: int, arena: KvArena) -> None:
        """
        Args:
            settings: say how many may be open at once, and how many may wait.
            vocabulary_size: ids of sequences are below it.
            arena: where sequences have their pages.
        """
        self._places = FairPlaces(settings.max_sequences - settings.kept_sequences, settings.kept_sequences)
        self._max_waiting = settings.max_waiting
        self._vocabulary_size = vocabulary_size
        self._page_tokens = arena.page_tokens
        self._total_tokens = arena.page_count * arena.page_tokens
        self._windows = arena.windows
        self._open: dict[Sequence, str] = {}
        """Each with its client."""

    @property
    def open_count(self) -> int:
        """Open sequences."""
        return self._places.held

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return self._places.waiting

    async def open(self, max_length: int, spare_tokens: int = 0, client: str = "") -> Sequence:
        """A sequence of up to `max_length` tokens, as soon as its client may have another.

        Its pages are given to it later, as it grows; `spare_tokens` more behind its end, as long as there are any.

        Raises:
            CapacityError: too many requests wait.
        """
        if not self._places.has_room(client) and self.waiting_count >= self._max_waiting:
            raise CapacityError(
                f"{self.open_count} sequences are open and {self.waiting_count} requests are waiting, which is the "
                "most; try later."
            )
        await self._places.take(client)
        sequence = self._opened(max_length, spare_tokens)
        self._open[sequence] = client
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Gives the place of a sequence that is no longer in use to a request that waits."""
        client = self._open.pop(sequence, None)
        if client is not None:
            self._places.leave(client)

    def refuse_waiting(self) -> None:
        """Ends the wait of everybody: the engine is closing."""
        self._places.refuse_waiting(ServiceUnavailableError("The engine is shutting down."))

    def _opened(self, max_length: int, spare_tokens: int) -> Sequence:
        most_tokens = min(max_length + spare_tokens, max(self._total_tokens, max_length))
        tables = [PageTable(self._page_tokens, most_tokens, window=window) for window in self._windows]
        return Sequence(tables, max_length, self._vocabulary_size, spare_tokens)

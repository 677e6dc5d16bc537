"""An 8B-shaped model with 60 GB for its keys and values: who fits. Only the accounting is real, the arena is not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tandem.engine.core.scheduler import PageScheduler
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry, arena_pages
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Admission, Segment, Sequence
from tandem.engine.settings import EngineSettings
from tandem.types import Delta

META = torch.device("meta")
LAYERS = [LayerGeometry(8, 128, 128)] * 32
MAX_LENGTH = 131_072
CHATS = 100
BYTES = 60 * 10**9


class Service:
    """What stands between a request and the arena, without an engine."""

    def __init__(self) -> None:
        settings = EngineSettings(max_sequences=128, max_waiting=0, kv_cache_bytes=BYTES)
        count = arena_pages(LAYERS, settings, MAX_LENGTH, torch.bfloat16, META)
        arena = KvArena(LAYERS, count, torch.bfloat16, META)
        self.cache = PagedCache(arena)
        self.scheduler = PageScheduler(self.cache, lambda _: None)
        self.admission = Admission(settings, 128_256, arena)

    def run(self, sequences: Iterable[Sequence]) -> int:
        """A step of all tokens that are not computed; returns how many sequences ran."""
        ready = self.scheduler.with_pages([Segment(part, part.pending_count) for part in sequences])
        for segment in ready:
            segment.sequence.advance(segment.token_count)
            self.cache.computed(segment.sequence)
        return len(ready)


@pytest.fixture
def service() -> Service:
    return Service()


async def test_a_hundred_chats_without_a_limit_run(service: Service) -> None:
    """Reserved at once, the whole length of three would fill the memory."""
    assert service.cache.usage().total_tokens // MAX_LENGTH == 3
    chats = [await service.admission.open(MAX_LENGTH) for _ in range(CHATS)]
    for number, chat in enumerate(chats):
        chat.apply(Delta(0, [number, *range(1999)]))
    assert service.run(chats) == CHATS
    assert service.cache.usage().reserved_tokens == CHATS * 2048
    for length in range(2000, 4000, 50):
        for chat in chats:
            chat.apply(Delta(length, [length] * 50))
        assert service.run(chats) == CHATS
    assert service.cache.preemption_count == 0
    assert service.cache.usage().used_tokens == CHATS * 4000
    assert service.cache.usage().reserved_tokens == CHATS * 4032


async def test_chats_that_outgrow_the_memory_still_all_go_on_to_their_end(service: Service) -> None:
    chats = [await service.admission.open(MAX_LENGTH) for _ in range(CHATS)]
    for number, chat in enumerate(chats):
        chat.apply(Delta(0, [number, *range(7999)]))
    done = 0
    while waiting := [chat for chat in chats if chat.pending_count]:
        ran = service.run(waiting)
        assert ran, "somebody can always run"
        done += ran
        for chat in waiting:
            if not chat.pending_count:
                service.cache.release(chat)
    assert done == CHATS


async def test_a_hundred_requests_hold_one_copy_of_a_common_prefix(service: Service) -> None:
    prefix = [(7 * step) % 9000 for step in range(4096)]
    requests = [await service.admission.open(MAX_LENGTH) for _ in range(CHATS)]
    for number, request in enumerate(requests):
        request.apply(Delta(0, [*prefix, number]))
        service.cache.reuse(request)
        assert service.run([request]) == 1
    assert service.cache.usage().reserved_tokens == 4096 + CHATS * 64
    assert len({tuple(request.table.pages[:64]) for request in requests}) == 1

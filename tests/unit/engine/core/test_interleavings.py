"""Clients that do anything at any time, with pages for three of their sequences: each reads what its own text says."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.core import scheduler
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta
from tests.unit.engine.conftest import MakeModel
from tests.unit.engine.greedy import RowsHead, plain_logits, running, settle

_MAX_LENGTH = 96
_TOTAL_TOKENS = 3 * 128


@dataclass
class Client:
    """One user of the engine, who opens sequences, extends, rolls back, repeats, cancels and releases."""

    engine: Engine[Any, Any]
    reference: Any
    draw: random.Random
    text: list[int] = field(default_factory=list)
    is_sure: bool = True
    """True if the engine is known to have the same text; False after a cancelled request."""
    answers: list[tuple[asyncio.Task[Tensor], list[int], int]] = field(default_factory=list)
    """Requests in flight: the task, the tokens that it should see, and its number of rows."""

    async def act(self, count: int) -> None:
        sequence = await self._opened()
        for _ in range(count):
            match self.draw.randrange(8):
                case 0 if self.text:  # the whole text again, as to a fresh replica
                    self._say(sequence, Delta(0, list(self.text)))
                case 1 if self.answers:
                    await self._turns()
                    self.answers.pop()[0].cancel()
                    self.is_sure = False
                case 2:
                    await self._check()
                case 3 if self.draw.random() < 0.3:
                    await self._leave(sequence)
                    sequence = await self._opened()
                case _:
                    # Few ids, so that texts often agree by chance.
                    new = [self.draw.randrange(3, 7) for _ in range(self.draw.randrange(1, 31))]
                    length = len(self.text)
                    base = self.draw.choice((length, length, self.draw.randrange(length + 1)))
                    base = base if self.is_sure else 0
                    self._say(sequence, Delta(min(base, _MAX_LENGTH - len(new)), new))
            await self._turns()
        await self._check()
        self.engine.release(sequence)

    async def _opened(self) -> Sequence:
        while self.draw.random() < 0.3:  # it gives up waiting
            with suppress(TimeoutError):
                self.engine.release(await asyncio.wait_for(self.engine.open(_MAX_LENGTH), 0.0005))
        self.text, self.is_sure = [], True
        return await self.engine.open(_MAX_LENGTH)

    def _say(self, sequence: Sequence, delta: Delta) -> None:
        self.text[delta.base_length :] = delta.token_ids
        self.is_sure = self.is_sure or delta.base_length == 0
        rows = self.draw.randrange(len(self.text) + 1)
        job = Job(sequence, delta, rows, None)
        self.answers.append((asyncio.create_task(self.engine.submit(job)), list(self.text), rows))

    async def _check(self) -> None:
        for task, text, count in self.answers:
            rows = await asyncio.wait_for(task, 20)
            if count:
                assert torch.allclose(rows, plain_logits(self.reference, text)[-count:], atol=1e-3)
        self.answers.clear()

    async def _leave(self, sequence: Sequence) -> None:
        """Release the sequence, with or without waiting for the answers."""
        if self.draw.random() < 0.5:
            await self._check()
        for task, _, _ in self.answers:
            task.cancel()
        self.answers.clear()
        self.engine.release(sequence)

    async def _turns(self) -> None:
        for _ in range(self.draw.randrange(3)):
            await asyncio.sleep(0.0005)
        usage = self.engine.usage
        assert usage.total_tokens == _TOTAL_TOKENS
        assert usage.reserved_tokens + usage.retained_tokens <= _TOTAL_TOKENS


@pytest.mark.parametrize(("chunk", "prefix_reuse"), [(5, True), (64, False)])
@pytest.mark.parametrize("family", ["llama", "mistral", "falcon"])
async def test_random_interleavings(
    family: str, chunk: int, prefix_reuse: bool, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.02)  # clients sit on their pages as long as they like
    model = tiny_model(family)
    backends = model.backends if model.backends.native is None else model.with_plans
    room = _TOTAL_TOKENS * 4 * sum(layer.values_per_token for layer in model.loaded.layers)
    limits: dict[str, Any] = {
        "max_length": _MAX_LENGTH,
        "max_sequences": 6,
        "kv_cache_bytes": room,
        "prefix_reuse": prefix_reuse,
    }
    async with running(backends, RowsHead(), prefill_chunk_tokens=chunk, **limits) as engine:
        clients = [Client(engine, model.reference, random.Random(n)) for n in range(9)]
        await asyncio.gather(*(client.act(30) for client in clients))
        await settle(engine)
        assert engine.usage.preemption_count > 0

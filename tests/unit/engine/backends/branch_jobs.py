"""A background job whose branches run given tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.engine.core.background import Lead
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import StepRecord
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.steps import BranchStep
from tandem.errors import TandemError
from tandem.types import Delta
from tests.unit.engine.greedy import plain_logits

LEAVES_AFTER = [5, 6, 6, 8, 7]
TOKENS = [[11, 12, 13, 14, 15], [21, 22, 23, 24], [31, 32, 33, 34]]
"""By depth; the last branch is given up after the first."""


@dataclass
class Branches:
    """A background job that runs given tokens."""

    sequence: Sequence
    delta: Delta
    row_count: int = 3
    done: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    trunk: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    error: TandemError | None = None
    steps: int = 0
    enough: int = 3
    leaves_after: SequenceOf[int] = tuple(LEAVES_AFTER)
    max_lead: int = 0
    lead: Lead | None = None

    def begin(self, logits: Tensor, room: int, lead: Lead | None) -> BranchStep | None:
        self.lead = lead
        self.trunk = logits.clone()
        assert room >= len(self.leaves_after) * len(TOKENS)
        return self._step()

    def advance(self, logits: Tensor) -> BranchStep | None:
        self.logits.append(logits.clone())
        if len(self.logits) == self.enough:
            self.loop.call_soon_threadsafe(self.done.set)
            return None
        return self._step()

    def _step(self) -> BranchStep:
        depth = len(self.logits)
        return BranchStep(self.sequence, TOKENS[depth], self.leaves_after, depth, len(TOKENS))

    def count_step(self, record: StepRecord) -> None:
        self.steps += 1

    def fail(self, error: TandemError) -> None:
        self.error = error
        self.loop.call_soon_threadsafe(self.done.set)

    def check_trunk(self, reference: Any, tokens: SequenceOf[int]) -> None:
        """Its rows are those of transformers."""
        assert self.error is None
        assert self.trunk is not None
        expected = plain_logits(reference, tokens)[-self.row_count :]
        assert torch.allclose(self.trunk, expected, atol=1e-3)

    def check_branches(self, reference: Any, trunk: SequenceOf[int]) -> None:
        """Each branch is what its tokens would be alone, behind as much of the trunk as it has."""
        assert self.error is None
        for depth, logits in enumerate(self.logits):
            for branch, row in enumerate(logits):
                path = [*trunk[: self.leaves_after[branch]], *(TOKENS[d][branch] for d in range(depth + 1))]
                expected = plain_logits(reference, path)[-1]
                assert torch.allclose(row, expected, atol=1e-3), (depth, branch)


async def run_together(engine: Engine[object, object], *jobs: Branches) -> None:
    """Submit the jobs at once, so that one step can hold all, and wait for their ends."""
    with engine._wakeup:
        for job in jobs:
            engine.put_back(job)
    async with asyncio.timeout(60):
        await asyncio.gather(*(job.done.wait() for job in jobs))


def poison(engine: Engine[object, object]) -> None:
    """Fill all unwritten memory with NaN."""
    for layer in engine._cache._arena.layers:  # type: ignore[attr-defined]
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))

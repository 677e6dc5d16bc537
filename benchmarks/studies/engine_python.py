"""`python -m benchmarks.studies.engine_python`: processor time of draft and target beside their models.

The engines are real, with their heads, cache and threads; the step backend computes nothing. What is left is Python:
for each sequence and for each step. The draft proposes 4 tokens in 4 steps, the target verifies 4 in one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.models.pairs import DEMO
from draft_service.proposers.drafting import propose_head
from draft_service.proposers.standalone import StandaloneProposer
from tandem.engine.backends.interface import StepBackend
from tandem.engine.backends.selection import Backends, choose_backends
from tandem.engine.core.engine import Engine
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import load_model
from tandem.engine.settings import EngineSettings
from tandem.types import Delta, DraftOptions, ProposeStep, RowKind, SamplingParams, TargetOptions, VerifyStep
from target_service.verifier import Verifier, verify_head

PROPOSED = 4
ACCEPTED = 2
"""Of the proposal, in each round."""
PROMPT_TOKENS = 40
SUPPORT = 24
MAX_LENGTH = 1024


class NoModel:
    """A step backend that computes nothing; see `StepBackend`."""

    def __init__(self, vocabulary_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(1024, vocabulary_size, generator=generator)

    def accepts(self, segments: Sequence[Segment]) -> bool:
        """Every step."""
        return True

    def run(self, segments: Sequence[Segment], rows: Sequence[int]) -> Tensor:
        """The same logits for every step, [len(rows), vocabulary_size]."""
        return self._logits[: len(rows)]

    @property
    def warm_up_steps(self) -> Sequence[tuple[int, ...]]:
        """One, for a warm-up."""
        return ((1,),)

    def prompt_tokens(self, limit: int) -> int:
        """As many as allowed."""
        return limit


@dataclass(frozen=True, slots=True)
class WithoutModel(Backends):
    """Backends whose steps compute nothing, with the sampler of those that would."""

    def steps(self, arena: KvArena) -> list[StepBackend]:
        """See `Backends.steps`."""
        return [NoModel(self.model.info.vocabulary_size)]


Round = Callable[[int], Awaitable[object]]
"""Runs one sequence's round, given its number."""


async def measured(rounds: Sequence[Round], count: int) -> tuple[float, float]:
    """Microseconds of the engine's thread and of the event loop for a sequence's round."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tandem-engine"]
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)

    async def run(one: Round, first: int, last: int) -> None:
        for number in range(first, last):
            await one(number)

    async def run_all(first: int, last: int) -> None:
        await asyncio.gather(*(run(one, first, last) for one in rounds))

    await run_all(0, 20)
    began, loop_began = time.clock_gettime(clock), time.thread_time()
    await run_all(20, 20 + count)
    rounds_run = count * len(rounds)
    engine_us = (time.clock_gettime(clock) - began) / rounds_run * 1e6
    return engine_us, (time.thread_time() - loop_began) / rounds_run * 1e6


def length_before(number: int) -> int:
    """Committed tokens of a sequence before its round."""
    return PROMPT_TOKENS + number * (ACCEPTED + 1) % (MAX_LENGTH - PROMPT_TOKENS - 2 * PROPOSED)


async def target_figures(sampling: SamplingParams, sequences: int, count: int) -> tuple[float, float]:
    """See `measured`."""
    backends = without_model("target")
    head = partial(verify_head, sampler=backends.sampler)
    engine: Engine[Any, Any] = Engine(backends.model, head, settings(), backends=backends)
    verifier = Verifier(engine, ())
    await verifier.start()
    support = np.arange(SUPPORT, dtype=np.int64)
    is_greedy = sampling.is_greedy
    kind = RowKind.TOKEN if is_greedy else RowKind.SUPPORT
    supports = () if is_greedy else (*(support for _ in range(PROPOSED)), support[:0])

    async with AsyncExitStack() as stack:
        rounds: list[Round] = []
        for number in range(sequences):
            options = TargetOptions(str(number), sampling, MAX_LENGTH, prompt_length=PROMPT_TOKENS)
            sequence = await stack.enter_async_context(verifier.sequence(options))
            await sequence.verify(VerifyStep(Delta(0, [number] * PROMPT_TOKENS), RowKind.TOKEN, 1))

            async def one(number: int, sequence: Any = sequence) -> object:
                delta = Delta(length_before(number), [7] * (PROPOSED + 1))
                return await sequence.verify(VerifyStep(delta, kind, PROPOSED + 1, supports))

            rounds.append(one)
        found = await measured(rounds, count)
    await verifier.close()
    return found


async def draft_figures(sampling: SamplingParams, sequences: int, count: int) -> tuple[float, float]:
    """See `measured`."""
    backends = without_model("draft")
    head = partial(propose_head, sampler=backends.sampler)
    engine: Engine[Any, Any] = Engine(backends.model, head, settings(), backends=backends)
    proposer = StandaloneProposer(engine, SUPPORT, 1.0, backends.sampler)
    await proposer.start()
    kind = RowKind.TOKEN if sampling.is_greedy else RowKind.SUPPORT

    async with AsyncExitStack() as stack:
        rounds: list[Round] = []
        for number in range(sequences):
            options = DraftOptions(str(number), sampling, MAX_LENGTH, kind)
            sequence = await stack.enter_async_context(proposer.sequence(options))
            await sequence.propose(ProposeStep(Delta(0, [number] * PROMPT_TOKENS), 1))

            async def one(number: int, sequence: Any = sequence) -> object:
                return await sequence.propose(ProposeStep(Delta(length_before(number), [7, 8]), PROPOSED))

            rounds.append(one)
        found = await measured(rounds, count)
    await proposer.close()
    return found


def settings() -> EngineSettings:
    """Room for the largest number of sequences."""
    return EngineSettings(max_length=MAX_LENGTH, max_sequences=64)


def without_model(role: str) -> WithoutModel:
    """The demo pair's sampler and sizes."""
    found = choose_backends(load_model(DEMO / role))
    return WithoutModel(found.model, native=replace(found.native, trace=None) if found.native else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=2000, help="of one sequence, shared by all")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ways = {"greedy": SamplingParams(0.0), "residual": SamplingParams(1.0, seed=3)}
    for name, sampling in ways.items():
        for sequences in given.sequences:
            count = max(10, given.rounds // sequences)
            for role, figures in (("draft", draft_figures), ("target", target_figures)):
                engine_us, loop_us = asyncio.run(figures(sampling, sequences, count))
                sys.stdout.write(
                    f"{name}, {sequences} sequences, {role}: "
                    f"{engine_us:.0f} us on the engine's thread, {loop_us:.0f} us on the event loop\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

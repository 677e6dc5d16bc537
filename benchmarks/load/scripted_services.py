"""A draft or a target without a model: `python -m benchmarks.load.scripted_services --role target --step-ms 5`.

A step begins when the one before it has ended, and answers everything that came meanwhile, as an engine's does. The
answers to one stream's sequences go in one message. So what is left to measure is the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.load.fakes import VOCABULARY_SIZE, FakeDraft, FakeTarget, rows
from benchmarks.load.script import Script
from draft_service.servicer import DraftedFor
from tandem.standard_streams import write_out
from tandem.types import (
    FloatArray,
    Proposal,
    ProposeStep,
    RowKind,
    SparseDistribution,
    StepCost,
    Verification,
    VerifyStep,
)
from tandem.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from tandem.v1.target_pb2_grpc import add_TargetServiceServicer_to_server

MAX_LENGTH = 65_536
SUPPORT_SIZE = 24
"""Ids of a draft's distribution, about as many as hold 0.98 of the demo draft's mass at temperature 1."""


class Steps:
    """Steps of a model that is not there."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: list[tuple[asyncio.Future[StepCost], int]] = []
        self._more = asyncio.Event()

    async def take_part(self, token_count: int) -> StepCost:
        """Take part in the next step; return its cost."""
        done: asyncio.Future[StepCost] = asyncio.get_running_loop().create_future()
        self._waiting.append((done, token_count))
        self._more.set()
        return await done

    async def run(self) -> None:
        """Run one step after the other."""
        while await self._more.wait():
            self._more.clear()
            taken, self._waiting = self._waiting, []
            await asyncio.sleep(self._seconds)
            cost = StepCost(self._seconds, len(taken), sum(count for _, count in taken))
            for done, _ in taken:
                if not done.done():
                    done.set_result(cost)


class ScriptedTarget(FakeTarget):
    """Says the script."""

    def __init__(self, script: Script, steps: Steps) -> None:
        super().__init__()
        self.model_info = replace(self.model_info, max_length=MAX_LENGTH)
        self._script = script
        self._steps = steps

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        """See `FakeTarget`."""
        cost = await self._steps.take_part(len(step.delta.token_ids))
        first = len(tokens) - step.row_count + 1
        said = [self._script.target_token(position) for position in range(first, len(tokens) + 1)]
        return Verification(first, rows(said, step), cost)


class ScriptedDraft(FakeDraft):
    """Guesses at the script."""

    def __init__(self, script: Script, steps: Steps) -> None:
        super().__init__()
        self.model_info = replace(self.model_info, max_length=MAX_LENGTH)
        self._script = script
        self._steps = steps

    async def answers(self, sequence: DraftedFor, tokens: Sequence[int], step: ProposeStep) -> None:
        """See `FakeDraft`."""
        cost = await self._steps.take_part(len(step.delta.token_ids))
        positions = range(len(tokens), len(tokens) + step.token_count)
        has_supports = sequence.options.row_kind is RowKind.SUPPORT
        drawn_from = tuple(map(self._distribution, positions)) if has_supports else ()
        guesses = tuple(map(self._script.draft_token, positions))
        await sequence.answer(Proposal(len(tokens), guesses, drawn_from, cost=cost))

    def _distribution(self, position: int) -> SparseDistribution:
        ids = self._script.support(position, SUPPORT_SIZE)
        return SparseDistribution(np.array(ids, np.int64), _PEAKED)


def _peaked(size: int) -> FloatArray:
    """Probabilities that sum to one: most of it on the first id."""
    probabilities = np.full(size, 0.1 / (size - 1))
    probabilities[0] = 0.9
    return probabilities


_PEAKED = _peaked(SUPPORT_SIZE)


async def _serve(role: str, script: Script, step_seconds: float) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    steps = Steps(step_seconds)
    if role == "target":
        add_TargetServiceServicer_to_server(ScriptedTarget(script, steps), server)
    else:
        add_DraftServiceServicer_to_server(ScriptedDraft(script, steps), server)
    ready = health.aio.HealthServicer()
    await ready.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_out(f"ready on 127.0.0.1:{port}\n")
    await steps.run()


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--role", choices=("target", "draft"), required=True)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--acceptance", type=float, default=0.72)
    options, _ = parser.parse_known_args(arguments)
    script = Script(VOCABULARY_SIZE, options.acceptance)
    uvloop.run(_serve(options.role, script, options.step_ms / 1000.0))


if __name__ == "__main__":
    main(sys.argv[1:])

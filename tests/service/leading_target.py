"""A target without a model that runs ahead, behind the real verifier: it counts, and takes time until outcomes come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from benchmarks.load.fakes import FakeTarget, NextToken, counting, rows
from tandem.engine.interface import RowRequest
from tandem.errors import TandemError
from tandem.telemetry.streams import NO_SERVICE_OBSERVER
from tandem.types import ModelInfo, RowKind, Verification
from target_service.servicer import TargetServicer, VerifiedFor
from target_service.verifier import Verifier


@dataclass(eq=False)
class Led:
    """A sequence of the engine."""

    tokens: list[int] = field(default_factory=list)
    allowed: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    leading: asyncio.Task[None] | None = None

    def end_lead(self) -> None:
        if self.leading is not None:
            self.leading.cancel()


class LeadingEngine:
    """Takes steps as the real engines do, each sequence by itself.

    A step that may lead to others lasts until the draft has pushed what follows its outcome, where that is expected:
    so it is known which steps begin by themselves.
    """

    def __init__(self, next_token: NextToken, info: ModelInfo) -> None:
        self.info = info
        self.patience_seconds = 10.0
        """How long to wait for an outcome at most; 0 where it may never come."""
        self.open_count = 0
        self.on_step: Callable[[], None] = lambda: None
        """Called in each step; what it raises ends the sequence."""
        self._next_token = next_token

    async def open(self, max_length: int, *, client: str = "") -> Led:
        self.open_count += 1
        return Led()

    def release(self, sequence: Led) -> None:
        self.open_count -= 1
        sequence.end_lead()

    async def run(self, sequence: Led, request: RowRequest) -> Verification:
        sequence.end_lead()
        sequence.allowed = request.step.lead
        answer = await self._step(sequence, request)
        sequence.leading = asyncio.create_task(self._lead(sequence, request.following(answer)))
        return answer

    def grant(self, sequence: Led, asked: int, lead: int) -> None:
        sequence.allowed = asked + lead
        sequence.more.set()

    async def _lead(self, sequence: Led, request: RowRequest | None) -> None:
        number = 0
        while request is not None:
            number += 1
            while number > sequence.allowed:
                sequence.more.clear()
                await sequence.more.wait()
            assert request.on_led is not None
            try:
                answer = await self._step(sequence, request)
            except TandemError as error:
                request.on_led(error)
                return
            request.on_led(replace(answer, led_token_id=request.step.delta.token_ids[0]))
            request = request.following(answer)

    async def _step(self, sequence: Led, request: RowRequest) -> Verification:
        self.on_step()
        step, tokens = request.step, sequence.tokens
        tokens[step.delta.base_length :] = step.delta.token_ids
        base_length = request.base_length
        said = [self._next_token(tokens[:length]) for length in range(base_length, len(tokens) + 1)]
        answer = Verification(base_length, rows(said, step))
        if step.lead and step.row_kind is RowKind.TOKEN:
            await self._outcomes(request, answer)
        await asyncio.sleep(0)
        return request.decided(answer)

    async def _outcomes(self, request: RowRequest, answer: Verification) -> None:
        until = asyncio.get_running_loop().time() + self.patience_seconds
        following = request.step.led_delta(answer, request.end_token_ids, request.max_length, lambda *_: (0,))
        while following is not None and asyncio.get_running_loop().time() < until:
            delta = request.step.led_delta(
                answer, request.end_token_ids, request.max_length, request.outcomes.find
            )
            if delta is None or len(delta.token_ids) >= len(following.token_ids):
                return
            await asyncio.sleep(0.001)


class LeadingTarget(FakeTarget):
    """Serves such an engine."""

    def __init__(self, next_token: NextToken = counting, eos_token_ids: tuple[int, ...] = ()) -> None:
        super().__init__(next_token, eos_token_ids)
        self._observer = NO_SERVICE_OBSERVER
        self.engine = LeadingEngine(next_token, self.model_info)
        self.verifier = Verifier(cast("Any", self.engine), ())

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        self.opened += 1
        await TargetServicer.serve_sequence(self, sequence)

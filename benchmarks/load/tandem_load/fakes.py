"""Draft and target services without a model, for tests and for measurements of the coordinator alone.

`python -m tandem_load.fakes --role target --step-ms 5` serves one that follows a script: a fixed text, and a draft
that is wrong at a fixed share of the positions. Both compute it from a position alone, so that they agree without a
word. A step begins when the one before it has ended, and answers everything that came meanwhile, as an engine's does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import grpc.aio
import numpy as np
import uvloop
from pydantic import Field

from tandem.config.settings import ServerSettings, load_settings
from tandem.engine.interface import KvUsage
from tandem.model.types import (
    Delta,
    DenseRow,
    FloatArray,
    IntArray,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    RowLogprobs,
    RowStatistics,
    SparseDistribution,
    StepCost,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
    own_token_ids,
)
from tandem.model_sources.bundled import demo_pair
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import Service, serve, set_start_aside
from tandem.serving.streams import SequenceStreams
from tandem.telemetry.logs import LogLevel, configure
from tandem.v1 import draft_pb2, target_pb2
from tandem.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from tandem.v1.target_pb2_grpc import add_TargetServiceServicer_to_server
from tandem_draft.servicer import DraftedFor, DraftServicer, LoadTracker
from tandem_load.common import StudySettings, one_sentence
from tandem_target.servicer import TargetServicer, VerifiedFor

NextToken = Callable[[Sequence[int]], int]
"""The token that a fake model continues these tokens with."""

VOCABULARY_SIZE = 2048
"""The demo pair's, whose tokenizer the fake target hands out."""
MAX_LENGTH = 64
"""Longest sequence of fakes that follow no script."""


def counting(tokens: Sequence[int]) -> int:
    """Return the number after the last token."""
    return tokens[-1] + 1


def scripted(script: Sequence[int], prompt_length: int) -> NextToken:
    """Produce the script's tokens one after the other, and then zeros."""
    return lambda tokens: [*script, *[0] * MAX_LENGTH][len(tokens) - prompt_length]


class LeaveError(Exception):
    """The sequence is to end without an error."""


class Fake:
    """Base of both fakes: a model's description, and counts of sequences."""

    def __init__(self, next_token: NextToken = counting, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.next_token = next_token
        self.model_info = ModelInfo(
            "fake", "Fake", VOCABULARY_SIZE, "hash", MAX_LENGTH, "none", eos_token_ids
        )
        # The servicers' own calls describe these.
        self.verifier: Any = self
        self.proposer: Any = self
        self.streams = SequenceStreams()
        self.usage = KvUsage(0, 0, 0, 0, 0)
        self.opened = 0
        self.finished = 0
        self.running = 0
        self.longest = 0  # tokens of a sequence so far

    def kv_usage(self) -> KvUsage:
        """Return the usage of the KV cache that it pretends to have."""
        return self.usage

    def begin(self, max_length: int) -> list[int]:
        """Begin a sequence, which must not be longer than the model can read; return its tokens."""
        assert max_length <= self.model_info.max_length
        self.opened += 1
        return []

    def apply(self, tokens: list[int], delta: Delta) -> None:
        """Apply the delta to the tokens; it must not leave a gap."""
        assert delta.base_length <= len(tokens)
        tokens[delta.base_length :] = delta.token_ids
        self.longest = max(self.longest, len(tokens))


class FakeTarget(Fake, TargetServicer):
    """A target whose distributions are one-hot, at any temperature."""

    step_seconds = 0.0

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        self.running += 1
        try:
            tokens = self.begin(sequence.options.max_length)
            async for step in sequence.steps():
                self.apply(tokens, step.delta)
                answer = await self.verified(tokens, step)
                if step.row_kind is not RowKind.DENSE:
                    answer.logprobs = sure_logprobs(answer, sequence.options)
                await sequence.answer(answer)
            self.finished += 1
        finally:
            self.running -= 1

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        await asyncio.sleep(self.step_seconds)
        return self.verification(tokens, step)

    def verification(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        first = len(tokens) - step.row_count + 1
        assert all(0 <= token_id < VOCABULARY_SIZE for token_id in (*tokens, *chain(*step.supports)))
        continuation = [self.next_token(tokens[:length]) for length in range(first, len(tokens) + 1)]
        return Verification(first, rows(continuation, step))

    @property
    def tokenizer_files(self) -> list[Path]:
        return [demo_pair().target / "tokenizer.json"]


def rows(continuation: Sequence[int], step: VerifyStep) -> tuple[TargetRow, ...]:
    """Return rows that give each of these tokens all the probability."""
    if step.row_kind is RowKind.DENSE:
        return tuple(map(sure_row, continuation))
    if step.row_kind is RowKind.TOKEN:
        return tuple(map(TokenRow, continuation))
    supports = [*step.supports, *[np.empty(0, np.int64)] * (step.row_count - len(step.supports))]
    return tuple(
        sure_support_row(token_id, support, with_statistics=step.with_statistics)
        for token_id, support in zip(continuation, supports, strict=True)
    )


def sure_logprobs(answer: Verification, options: TargetOptions) -> tuple[RowLogprobs, ...]:
    """Those beside rows that give one token all the probability; the next higher ids rank behind it."""
    if options.logprobs is None and not options.sampled_logprobs:
        return ()
    return tuple(_sure_logprobs(row, options) for row in answer.rows)


def _sure_logprobs(row: TargetRow, options: TargetOptions) -> RowLogprobs:
    own = own_token_ids(row)
    sure = row.token_id if isinstance(row, TokenRow) else _sure_token(row)
    numbers = tuple(0.0 if token_id == sure else -1000.0 for token_id in own)
    found = RowLogprobs((), (), ())
    if options.logprobs is not None:
        count = options.logprobs
        tops = tuple((sure + more) % VOCABULARY_SIZE for more in range(count))
        top_logprobs = tuple(-900.0 if more else 0.0 for more in range(count))
        size = 1 + len(row.token_ids) if isinstance(row, SupportRow) else 1
        found = RowLogprobs(tops, top_logprobs, numbers[:size])
    if options.sampled_logprobs:
        found = replace(found, raw_logprobs=numbers, processed_logprobs=numbers)
    return found


def _sure_token(row: TargetRow) -> int:
    assert isinstance(row, SupportRow)
    return int(row.token_ids[row.probs.argmax()]) if row.outside_mass == 0.0 else row.outside_token_id


def sure_row(token_id: int) -> DenseRow:
    """Return logits that give this token all the probability; the next higher id ranks second."""
    logits = np.full(VOCABULARY_SIZE, -1000.0, np.float32)
    logits[token_id], logits[(token_id + 1) % VOCABULARY_SIZE] = 0.0, -900.0
    return DenseRow(logits)


def sure_support_row(token_id: int, support: IntArray, *, with_statistics: bool = False) -> SupportRow:
    """Return the row of a target that gives this token all the probability, on a support."""
    inside = support == token_id
    outside = float(not inside.any())
    statistics = RowStatistics(
        entropy=0.0,
        max_prob=1.0,
        argmax_token_id=token_id,
        ranks=(~inside).astype(np.int64),
        logits=np.where(inside, 0.0, -1000.0).astype(np.float32),
    )
    return SupportRow(
        support,
        inside.astype(float),
        outside_mass=outside,
        outside_token_id=token_id if outside else -1,
        statistics=statistics if with_statistics else None,
        outside_prob=outside,
    )


class FakeDraft(Fake, DraftServicer):
    """A draft with one-hot distributions. Tests override `respond` to make it misbehave; None ends the sequence."""

    def __init__(self, next_token: NextToken = counting) -> None:
        super().__init__(next_token)
        self.load = LoadTracker(lambda: self.is_full)
        self.is_full = False
        self.requested: list[int] = []

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.running += 1
        self.load.sequences += 1
        try:
            tokens = self.begin(sequence.options.max_length)
            async for step in sequence.steps():
                self.apply(tokens, step.delta)
                self.requested.append(step.token_count)
                if step.is_answered:
                    await self.answers(sequence, tokens, step)
            self.finished += 1
        except LeaveError:
            pass
        finally:
            self.running -= 1
            self.load.sequences -= 1

    async def answers(self, sequence: DraftedFor, tokens: Sequence[int], step: ProposeStep) -> None:
        if (answer := await self.respond(tokens, step.token_count)) is None:
            raise LeaveError
        await sequence.answer(answer)

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal | None:
        return self.proposal(tokens, count)

    def proposal(self, tokens: Sequence[int], count: int) -> Proposal:
        continuation: list[int] = []
        for _ in range(count):
            continuation.append(self.next_token([*tokens, *continuation]))
        sure = [SparseDistribution(np.array([token_id]), np.ones(1)) for token_id in continuation]
        return Proposal(len(tokens), tuple(continuation), tuple(sure))


# ---- fakes that follow a script

_SCRIPTED_LENGTH = 65_536
"""Longest scripted sequence: no load asks for more."""
_SUPPORT_SIZE = 24
"""Ids of a draft's distribution, about as many as hold 0.98 of the demo draft's mass at temperature 1."""
_FIRST_ID = 300
"""Lower ids are special tokens and single bytes, which are no characters on their own."""


@dataclass(frozen=True, slots=True)
class Script:
    """A text of a target and the draft's guesses at it."""

    acceptance: float
    """Share of positions at which the draft is right."""

    def target_token(self, position: int) -> int:
        return _FIRST_ID + _hash(position) % (VOCABULARY_SIZE - _FIRST_ID)

    def draft_token(self, position: int) -> int:
        token_id = self.target_token(position)
        is_right = _hash(position + 7) % 1000 < 1000 * self.acceptance
        return token_id if is_right else _other(token_id)

    def support(self, position: int, size: int) -> tuple[int, ...]:
        """The draft's ids at a position, its guess first; the target's token is among them only if it is that."""
        guess, target = self.draft_token(position), self.target_token(position)
        others = (_other(guess, more) for more in range(1, size + 1))
        return (guess, *[each for each in others if each != target][: size - 1])


def _hash(number: int) -> int:
    # Knuth's multiplicative hash (The Art of Computer Programming, volume 3, 6.4)
    return (number * 2654435761 & 0xFFFFFFFF) >> 8


def _other(token_id: int, more: int = 1) -> int:
    """The id so many places behind another, from the first again after the last."""
    return _FIRST_ID + (token_id - _FIRST_ID + more) % (VOCABULARY_SIZE - _FIRST_ID)


class Steps:
    """Steps of a model that is not there."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: list[tuple[asyncio.Future[StepCost], int]] = []
        self._more = asyncio.Event()

    async def take_part(self, token_count: int) -> StepCost:
        done: asyncio.Future[StepCost] = asyncio.get_running_loop().create_future()
        self._waiting.append((done, token_count))
        self._more.set()
        return await done

    async def run(self) -> None:
        while await self._more.wait():
            self._more.clear()
            taken, self._waiting = self._waiting, []
            await asyncio.sleep(self._seconds)
            cost = StepCost(self._seconds, len(taken), sum(count for _, count in taken))
            for done, _ in taken:
                if not done.done():
                    done.set_result(cost)
            await asyncio.sleep(0)  # what goes on by another step takes part in the next one


class Scripted(Fake):
    """Base of the fakes that know the script."""

    def __init__(self, script: Script, steps: Steps) -> None:
        super().__init__()
        self.model_info = replace(self.model_info, max_length=_SCRIPTED_LENGTH)
        self._script = script
        self._steps = steps


class ScriptedTarget(Scripted, FakeTarget):
    """Says the script."""

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        cost = await self._steps.take_part(len(step.delta.token_ids))
        first = len(tokens) - step.row_count + 1
        said = [self._script.target_token(position) for position in range(first, len(tokens) + 1)]
        return Verification(first, rows(said, step), cost)


class ScriptedDraft(Scripted, FakeDraft):
    """Guesses at the script."""

    async def answers(self, sequence: DraftedFor, tokens: Sequence[int], step: ProposeStep) -> None:
        began, cost = time.monotonic(), await self._steps.take_part(len(step.delta.token_ids))
        positions = range(len(tokens), len(tokens) + step.token_count)
        has_supports = sequence.options.row_kind is RowKind.SUPPORT
        drawn_from = tuple(map(self._distribution, positions)) if has_supports else ()
        guesses = tuple(map(self._script.draft_token, positions))
        proposal = Proposal(len(tokens), guesses, drawn_from, cost=cost)
        self.load.answered(time.monotonic() - began, proposal)
        await sequence.answer(proposal)

    def _distribution(self, position: int) -> SparseDistribution:
        ids = self._script.support(position, _SUPPORT_SIZE)
        return SparseDistribution(np.array(ids, np.int64), _PEAKED)


_PEAKED: FloatArray = np.array([0.9, *[0.1 / (_SUPPORT_SIZE - 1)] * (_SUPPORT_SIZE - 1)])
"""Probabilities that sum to one: most of it on the first id."""


class ScriptedService(Service):
    """Serves a scripted target or draft."""

    def __init__(self, role: str, script: Script, steps: Steps) -> None:
        is_target = role == "target"
        self.name = role
        protos = target_pb2 if is_target else draft_pb2
        self.full_names = [each.full_name for each in protos.DESCRIPTOR.services_by_name.values()]
        self._servicer: Any = (ScriptedTarget if is_target else ScriptedDraft)(script, steps)
        self._add: Any = (
            add_TargetServiceServicer_to_server if is_target else add_DraftServiceServicer_to_server
        )
        self._steps = steps

    def register(self, server: grpc.aio.Server) -> None:
        self._add(self._servicer, server)

    def open_other_endpoints(self, calls: RunningCalls) -> None:
        self._servicer.streams.calls = calls

    async def start(self) -> None:
        self._running = asyncio.create_task(self._steps.run())

    async def close(self) -> None:
        self._running.cancel()


class ScriptedSettings(StudySettings):
    """Serve a draft or a target that follows a script, and has no model."""

    env_prefix: ClassVar = "TANDEM_SCRIPTED_"

    role: Literal["target", "draft"]
    """The service that it plays."""
    step_ms: float = Field(default=5.0, ge=0)
    """Duration of a step."""
    acceptance: float = Field(default=0.72, ge=0, le=1)
    """Share of right guesses of the draft."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    log_level: LogLevel = "warning"
    """Lowest severity of log lines."""


def main(arguments: Sequence[str]) -> None:
    """Serve until a signal ends the process."""
    with one_sentence():
        settings = load_settings(ScriptedSettings, arguments, "python -m tandem_load.fakes")
        configure(settings.log_level, "text")
        steps = Steps(settings.step_ms / 1000.0)
        service = ScriptedService(settings.role, Script(settings.acceptance), steps)
        uvloop.run(serve(ServerSettings(port=settings.port), service, before_ready=set_start_aside))


if __name__ == "__main__":
    main(sys.argv[1:])

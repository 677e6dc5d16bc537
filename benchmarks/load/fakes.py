"""Draft and target services without a model, for tests and for measurements of the coordinator alone."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain

import numpy as np

from benchmarks.pairs import DEMO
from draft_service.servicer import DraftedFor, DraftServicer
from tandem.serving.interceptors import Context
from tandem.serving.streams import SequenceStreams
from tandem.types import (
    Delta,
    DenseRow,
    IntArray,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    RowStatistics,
    SparseDistribution,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire.common import model_info_to_proto
from target_service.servicer import TargetServicer, VerifiedFor

NextToken = Callable[[Sequence[int]], int]
"""The token that a fake model continues these tokens with."""

VOCABULARY_SIZE = 2048
"""Of the demo pair, whose tokenizer the fake target hands out."""
MAX_LENGTH = 64


def counting(tokens: Sequence[int]) -> int:
    """Return the number after the last token."""
    return tokens[-1] + 1


def scripted(script: Sequence[int], prompt_length: int) -> NextToken:
    """Produce the script's tokens one after the other, and then zeros."""
    return lambda tokens: [*script, *[0] * MAX_LENGTH][len(tokens) - prompt_length]


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


class LeaveError(Exception):
    """The sequence is to end without an error."""


class Fake:
    """Base of both fakes: a model's description, and counts of sequences."""

    def __init__(self, next_token: NextToken = counting, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.next_token = next_token
        self.model_info = ModelInfo(
            "fake", "Fake", VOCABULARY_SIZE, "hash", MAX_LENGTH, "none", eos_token_ids
        )
        self.streams = SequenceStreams()
        self.opened = 0
        self.finished = 0
        self.running = 0
        self.longest = 0
        """Maximum number of tokens of a sequence so far."""

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
    """Duration of a step."""

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        """Answer each step."""
        self.running += 1
        try:
            tokens = self.begin(sequence.options.max_length)
            async for step in sequence.steps():
                self.apply(tokens, step.delta)
                await sequence.answer(await self.verified(tokens, step))
            self.finished += 1
        finally:
            self.running -= 1

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        """Return the answer to a step."""
        await asyncio.sleep(self.step_seconds)
        return self.verification(tokens, step)

    def verification(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        """Return a row for each of the last positions."""
        first = len(tokens) - step.row_count + 1
        assert all(0 <= token_id < VOCABULARY_SIZE for token_id in (*tokens, *chain(*step.supports)))
        continuation = [self.next_token(tokens[:length]) for length in range(first, len(tokens) + 1)]
        return Verification(first, rows(continuation, step))

    async def GetModelInfo(
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        """The model that is not there."""
        return target_pb2.TargetServiceGetModelInfoResponse(model_info=model_info_to_proto(self.model_info))

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        """The demo pair's."""
        path = DEMO / "target" / "tokenizer.json"
        yield target_pb2.GetTokenizerResponse(file_name=path.name, content=path.read_bytes())


def rows(continuation: Sequence[int], step: VerifyStep) -> tuple[TargetRow, ...]:
    """Rows that give each of these tokens all the probability."""
    if step.row_kind is RowKind.DENSE:
        return tuple(map(sure_row, continuation))
    if step.row_kind is RowKind.TOKEN:
        return tuple(map(TokenRow, continuation))
    supports = [*step.supports, *[np.empty(0, np.int64)] * (step.row_count - len(step.supports))]
    return tuple(
        sure_support_row(token_id, support, with_statistics=step.with_statistics)
        for token_id, support in zip(continuation, supports, strict=True)
    )


class FakeDraft(Fake, DraftServicer):
    """A draft with one-hot distributions. Tests override `respond` to make it misbehave."""

    def __init__(self, next_token: NextToken = counting) -> None:
        super().__init__(next_token)
        self.requested: list[int] = []
        """Number of tokens that each step requested."""

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        """Answer each step."""
        self.running += 1
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

    async def answers(self, sequence: DraftedFor, tokens: Sequence[int], step: ProposeStep) -> None:
        """Answer a step."""
        answer = await self.respond(tokens, step.token_count)
        if answer is None:
            raise LeaveError
        await sequence.answer(answer)

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal | None:
        """Return the proposal that answers a step; None ends the sequence."""
        return self.proposal(tokens, count)

    def proposal(self, tokens: Sequence[int], count: int) -> Proposal:
        """Return the correct proposal."""
        continuation: list[int] = []
        for _ in range(count):
            continuation.append(self.next_token([*tokens, *continuation]))
        sure = [SparseDistribution(np.array([token_id]), np.ones(1)) for token_id in continuation]
        return Proposal(len(tokens), tuple(continuation), tuple(sure))

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """The model that is not there."""
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=model_info_to_proto(self.model_info))

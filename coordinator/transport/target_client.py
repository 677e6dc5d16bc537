"""Checks on a target's rows that hold for every acceptance rule.

The client checks each answer as it arrives, so that an invalid one costs only the replica that sent it. If the
acceptance rule found it, the request would end.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import grpc.aio
import numpy as np

from coordinator.decoding.completion import Completion
from coordinator.rejection import MessageRounds, Round
from coordinator.rejection.rounds import Decide
from coordinator.telemetry.observer import NO_OBSERVER, StreamObserver
from coordinator.transport.remote_sequence import RemoteSequence
from coordinator.transport.streams import Methods, SequenceStream, StreamChoice
from tandem.errors import ProtocolError, ServiceUnavailableError, TandemError
from tandem.rpc.channels import errors_of
from tandem.types import (
    Delta,
    DenseRow,
    IntArray,
    ModelFeature,
    ModelInfo,
    Proposal,
    RowKind,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire import target as wire
from tandem.wire.columns import Arrived
from tandem.wire.common import model_info_from_proto
from tandem.wire.target import ColumnAnswer, RowBlock


def check_rows(verification: Verification, vocabulary_size: int, *, with_statistics: bool = False) -> None:
    """Refuse rows that no model of that vocabulary has, and support rows that lack the statistics asked for.

    Raises:
        ProtocolError: an id is unknown, a dense row has another width, a number is no probability or logit, or
            statistics are missing.
    """
    for row in verification.rows:
        if isinstance(row, TokenRow):
            if not 0 <= row.token_id < vocabulary_size:  # to call `_check_id` for each takes twice as long
                _check_id(row.token_id, 0, vocabulary_size)
        elif isinstance(row, SupportRow):
            _check_support_row(row, vocabulary_size)
            if with_statistics and row.statistics is None:
                raise ProtocolError("target service: a row came without statistics; they were asked for")
        else:
            _check_dense_row(row, vocabulary_size)


def _check_id(token_id: int, minimum: int, vocabulary_size: int) -> None:
    if not minimum <= token_id < vocabulary_size:
        raise ProtocolError(
            f"target service: it sent token id {token_id}; ids must be in 0..{vocabulary_size - 1}"
        )


def _check_support_row(row: SupportRow, vocabulary_size: int) -> None:
    # -1 stands for no token outside the support; then the mass there does not count.
    _check_id(row.outside_token_id, -1, vocabulary_size)
    outside = row.outside_mass if row.outside_token_id >= 0 else 0.0
    values = row.probs.tolist()
    minimum, mass = min(values, default=0.0), sum(values) + outside
    # A NaN makes the sum one, and comparisons with it are false. The sum may exceed 1: the support may name a token
    # twice.
    if not (minimum >= 0.0 and outside >= 0.0 and 0.0 < mass < math.inf):
        raise ProtocolError(
            f"target service: a row's lowest probability is {np.min([outside, *values]):g} and their sum is {mass:g}; "
            "no probability may be negative, and the sum must be a positive number"
        )
    # A token's probability is at most the mass that holds it, before and after rounding.
    if row.outside_prob is not None and not 0.0 <= row.outside_prob <= outside:
        raise ProtocolError(
            f"target service: a row's token outside the support has the probability {row.outside_prob:g}; it must be "
            f"between 0 and the mass there, {outside:g}"
        )
    if row.statistics is not None:
        _check_statistics(row.statistics, vocabulary_size)


def _check_statistics(statistics: RowStatistics, vocabulary_size: int) -> None:
    _check_id(statistics.argmax_token_id, 0, vocabulary_size)
    maximum = float(statistics.logits.max(initial=-math.inf))
    numbers = {"entropy": statistics.entropy, "highest probability": statistics.max_prob}
    for name, value in numbers.items():
        # Rounding may leave an entropy just below zero.
        if not math.isfinite(value):
            raise ProtocolError(f"target service: a row's {name} is {value:g}; it must be a finite number")
    if not maximum < math.inf:
        raise ProtocolError(
            f"target service: a row's highest logit in its support is {maximum:g}; it must be a number below infinity"
        )


def _check_dense_row(row: DenseRow, vocabulary_size: int) -> None:
    if row.logits.shape != (vocabulary_size,):
        raise ProtocolError(
            f"target service: a dense row holds {row.logits.size} logits; it must hold {vocabulary_size}, one for "
            "each token of the vocabulary"
        )
    # One pass is enough: max() returns NaN wherever there is one. Models forbid single tokens by minus infinity.
    maximum = float(row.logits.max())
    if not math.isfinite(maximum):
        raise ProtocolError(
            f"target service: a dense row's highest logit is {maximum:g}; it must be a finite number"
        )


_PROBE_SECONDS = 30.0
"""Timeout of a probe. Probes repeat for as long as the target is set aside."""


class TargetClient:
    """Calls one target service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = TargetServiceStub(channel)
        self._streams: StreamChoice[wire.Answer] = StreamChoice(
            Methods(
                service="target service",
                open_one=channel.stream_stream("/tandem.v1.TargetService/Verify"),
                read=target_pb2.VerifyResponse.FromString,
                open_many=channel.stream_stream("/tandem.v1.TargetService/VerifyMany"),
                message=lambda parts: target_pb2.VerifyManyRequest(parts=parts),
                read_many=target_pb2.VerifyManyResponse.FromString,
                read_columns=wire.columns_from_proto,
            )
        )
        self._messages = _Messages()

    async def model_info(self) -> ModelInfo:
        """Its model.

        Raises:
            TandemError: the service failed.
        """
        with errors_of("target service"):
            answer = await self._stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest())
        return model_info_from_proto(answer.model_info)

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Its tokenizer's files by name.

        Raises:
            TandemError: the service failed.
        """
        files: defaultdict[str, bytes] = defaultdict(bytes)
        with errors_of("target service"):
            async for part in self._stub.GetTokenizer(target_pb2.GetTokenizerRequest()):
                files[part.file_name] += part.content
        return dict(files)

    async def probe(self) -> None:
        """Ask it to verify one token.

        Raises:
            TandemError: it failed, or did not answer in time.
        """
        options = TargetOptions("probe", SamplingParams(temperature=0.0), max_length=2, prompt_length=1)
        step = VerifyStep(Delta(0, (0,)), RowKind.TOKEN, 1)
        stream = self._streams.stream()
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await stream.ask(wire.options_to_proto(options), wire.step_to_proto(step))
                await stream.finish(wire.finish_to_proto(token_count=0))
        except TimeoutError:
            raise ServiceUnavailableError(
                f"target service: it did not answer a probe within {_PROBE_SECONDS:g} s"
            ) from None
        finally:
            stream.cancel()

    def sequence(
        self,
        options: TargetOptions,
        rows: RowChoice,
        observer: StreamObserver = NO_OBSERVER,
        features: Collection[ModelFeature] = (),
    ) -> TargetSequence:
        """Begin a sequence on it. The caller must cancel the sequence in the end, whatever happens.

        Args:
            options: Sent to the service when the sequence opens.
            rows: Which rows the service answers with.
            observer: Observes the stream.
            features: Features that the service announced.
        """
        stream = self._streams.stream(observer.traffic)
        options = replace(options, traceparent=observer.traceparent, takes_columns=True)
        return TargetSequence(stream, options, rows, observer, features, self._messages)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Which rows the acceptance rule of a request needs."""

    kind: RowKind
    supports: Callable[[Proposal], tuple[IntArray, ...]]
    """The support of each row, for support rows."""
    vocabulary_size: int
    """The target's; ids in its answers must be below it, and dense rows hold as many logits."""
    with_statistics: bool = False
    decide_many: Decide | None = None
    """Decides the rounds of many sequences at once; None where the rule decides each alone."""

    def kind_for(self, proposal: Proposal) -> RowKind:
        """With nothing proposed, a support row would hold only a sample of the target, which a token row holds too."""
        needs_sample_only = not proposal.token_ids and not self.with_statistics
        return RowKind.TOKEN if self.kind is RowKind.SUPPORT and needs_sample_only else self.kind


class _Messages:
    """The rounds that the latest message answers. A message's answers are read one after the other."""

    def __init__(self) -> None:
        self._block: RowBlock | None = None
        self._rounds = MessageRounds()

    def rounds(self, block: RowBlock) -> MessageRounds:
        """The rounds of the message with this block."""
        if block is not self._block:
            self._block, self._rounds = block, MessageRounds()
        return self._rounds


@dataclass(frozen=True, slots=True)
class _Asked:
    """A verification that is awaited."""

    proposal: Proposal
    base_length: int
    step: VerifyStep


class TargetSequence:
    """Asks a target service for rows, for as long as the sequence stays there."""

    def __init__(
        self,
        stream: SequenceStream[wire.Answer],
        options: TargetOptions,
        rows: RowChoice,
        observer: StreamObserver = NO_OBSERVER,
        features: Collection[ModelFeature] = (),
        messages: _Messages | None = None,
    ) -> None:
        self._stream = stream
        self._messages = messages or _Messages()
        self._asked: _Asked | None = None
        self._early: tuple[wire.Answer, Verification] | None = None
        """An answer that was read when it came, before its sequence went on."""
        if rows.decide_many is not None:
            stream.read_on_arrival(self._read_early)
        self._features = features
        self._observer = observer
        self._options = options
        self._rows = rows
        self._remote = RemoteSequence()
        self._committed: Sequence[int] = ()
        """The completion's tokens, a list that grows with it."""
        self.is_new = True
        """True before the first answer."""

    @property
    def was_asked(self) -> bool:
        """True if the service may have seen a step: then the step itself may have ended the sequence."""
        return self._stream.was_sent

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """The target's row at each position of the proposal, and at the one after it.

        Raises:
            TandemError: the service failed, refused, or sent an invalid answer. The sequence is of no further use.
        """
        self._committed = completion.token_ids
        asked = self._asked = _Asked(proposal, completion.length, self._step(completion, proposal))
        try:
            self._check_features()
            opening = (wire.options_to_proto(self._options),) if self.is_new else ()
            answer = await self._stream.ask(*opening, wire.step_to_proto(asked.step))
            verification = self._taken_early(answer) or self._verification(answer, asked)
        except TandemError as error:
            self._observer.ended(error)
            raise
        self.is_new = False
        return verification

    def _step(self, completion: Completion, proposal: Proposal) -> VerifyStep:
        kind = self._rows.kind_for(proposal)
        return VerifyStep(
            delta=self._remote.delta_to(completion.token_ids, proposal.token_ids),
            row_kind=kind,
            row_count=len(proposal) + 1,
            supports=self._rows.supports(proposal) if kind is RowKind.SUPPORT else (),
            with_statistics=self._rows.with_statistics,
            # After an empty proposal the token is the target's own sample, whatever kind of row it comes in.
            raced_recovery=kind is RowKind.SUPPORT and len(proposal) > 0,
        )

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if not self.is_new:
            await self._stream.finish(wire.finish_to_proto(self._remote.kept_length(self._committed)))

    def cancel(self) -> None:
        """Drop the sequence, whatever the target is doing for it."""
        self._stream.cancel()
        self._observer.ended()

    def _check_features(self) -> None:
        if self._options.adjustments and ModelFeature.LOGIT_ADJUSTMENTS not in self._features:
            # Requests are refused where no target has the feature; this one may have come from a target that has it.
            raise ProtocolError("target service: it is too old to apply logit_bias and min_tokens")

    def _taken_early(self, answer: wire.Answer) -> Verification | None:
        """The verification that was read when the answer came, if it was."""
        early, self._asked, self._early = self._early, None, None
        return early[1] if early is not None and early[0] is answer else None

    def _read_early(self, arrived: Arrived[wire.Answer]) -> None:
        """An answer has come with others: let its rule decide on all of their rounds at once."""
        answer, asked, decide = arrived.answer, self._asked, self._rows.decide_many
        if decide is None or asked is None or not isinstance(answer, ColumnAnswer):
            return
        if asked.step.row_kind is not RowKind.SUPPORT:
            return
        try:
            found = self._verification(answer, asked)
        except TandemError:
            return  # the sequence finds the same when it reads the answer
        own = Round(asked.proposal, found, self._options.sampling)
        self._early = answer, self._messages.rounds(answer.block).add(decide, own)

    def _verification(self, answer: wire.Answer, asked: _Asked) -> Verification:
        if answer.base_length != asked.base_length:
            raise ProtocolError(
                f"target service: it answered for {answer.base_length} tokens; it was asked for {asked.base_length}"
            )
        verification = wire.verification_from_proto(answer, asked.step)
        check_rows(verification, self._rows.vocabulary_size, with_statistics=asked.step.with_statistics)
        return verification

"""A draft service, as the coordinator sees it. Whatever goes wrong there costs the speed-up, never the request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import grpc.aio

from coordinator.completion import Completion
from coordinator.lane import Lane
from coordinator.observer import NO_OBSERVER, StreamObserver
from coordinator.remote_sequence import RemoteSequence
from coordinator.streams import Methods, Streams
from tandem.channels import errors_of
from tandem.errors import ProtocolError, TandemError
from tandem.types import DenseLogits, DraftDistribution, DraftOptions, ModelInfo, Proposal, ProposeStep
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceStub
from tandem.wire import draft as wire
from tandem.wire.common import model_info_from_proto


class DraftClient:
    """Calls one draft service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = DraftServiceStub(channel)
        self._streams = Streams(
            Methods(
                service="draft service",
                open_one=channel.stream_stream("/tandem.v1.DraftService/Propose"),
                read=draft_pb2.ProposeResponse.FromString,
                open_many=channel.stream_stream("/tandem.v1.DraftService/ProposeMany"),
                message=lambda parts: draft_pb2.ProposeManyRequest(parts=parts),
                read_many=draft_pb2.ProposeManyResponse.FromString,
            )
        )

    async def model_info(self) -> ModelInfo:
        """What it drafts with.

        Raises:
            TandemError: the service failed.
        """
        with errors_of("draft service"):
            answer = await self._stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest())
        return model_info_from_proto(answer.model_info)

    def sequence(
        self,
        options: DraftOptions,
        limits: DraftLimits,
        watch: StreamObserver = NO_OBSERVER,
    ) -> DraftSequence:
        """Begin a sequence on it. It must be cancelled in the end, whatever happens."""
        lane = self._streams.lane(watch.traffic)
        return DraftSequence(lane, replace(options, traceparent=watch.traceparent), limits, watch)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What is asked of a draft."""

    num_speculative_tokens: int
    """Tokens to propose in a round."""
    vocabulary_size: int
    """The target's; proposed ids must be below it."""


class NoDrafter:
    """Proposes nothing: the target alone."""

    async def propose(self, completion: Completion) -> Proposal:
        """An empty proposal."""
        return Proposal(completion.length)

    async def finish(self) -> None:
        """Nothing to end."""

    def cancel(self) -> None:
        """Nothing to drop."""


class DraftSequence:
    """Asks a draft service for proposals, for as long as the sequence stays there.

    It begins by letting the draft read the sequence while the target does, without waiting for it. One step at a time
    is under way; while its answer is late, no other is asked for.
    """

    def __init__(
        self,
        lane: Lane[draft_pb2.ProposeResponse],
        options: DraftOptions,
        limits: DraftLimits,
        watch: StreamObserver = NO_OBSERVER,
    ) -> None:
        self._lane = lane
        self._watch = watch
        self._options = options
        self._limits = limits
        self._remote = RemoteSequence()
        self._answer: asyncio.Task[Proposal] | None = None
        self._is_open = False
        self._late_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every step so far was answered."""
        return self._answer is None or self._answer.done()

    @property
    def is_open(self) -> bool:
        """Whether the draft has read the sequence once. Before, it may as well wait for room."""
        return self._is_open

    @property
    def is_late(self) -> bool:
        """Whether an answer has been awaited in vain."""
        return self._late_since is not None

    @property
    def late_seconds(self) -> float:
        """For how long; 0 when none is late."""
        return 0.0 if self._late_since is None else time.monotonic() - self._late_since

    def begin(self, completion: Completion) -> None:
        """Open the sequence, and let the draft read it."""
        self._ask(completion, 0, wire.options_to_proto(self._options))

    async def propose(self, completion: Completion, count: int, patience_seconds: float) -> Proposal | None:
        """Up to `count` tokens that may follow; None while the draft is late.

        Raises:
            TandemError: the draft failed, or proposed what cannot be verified. It is of no use any more.
        """
        until = time.monotonic() + patience_seconds
        try:
            if self._answer is not None and await self._answered(until) is None:
                return None
            self._ask(completion, count)
            proposal = await self._answered(until)
            if proposal is not None:
                check_proposal(
                    proposal,
                    completion.length,
                    count,
                    self._limits.vocabulary_size,
                    with_token_logits=self._options.with_token_logits,
                )
        except TandemError as error:
            self._watch.ended(error)
            raise
        return proposal

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if self._answer is None:
            await self._lane.finish(wire.finish_to_proto())

    def cancel(self) -> None:
        """Drop it, whatever is being done for it."""
        self._lane.cancel()
        self._watch.ended()
        if self._answer is not None:
            # It may fail all the same, when the end of the call comes first; nobody else will ask for it.
            self._answer.add_done_callback(_forget)
            self._answer.cancel()

    def _ask(self, completion: Completion, count: int, *opening: draft_pb2.ProposeRequest) -> None:
        step = ProposeStep(self._remote.delta_to(completion.token_ids), count)
        self._answer = asyncio.create_task(self._exchange(*opening, wire.step_to_proto(step)))

    async def _answered(self, until: float) -> Proposal | None:
        """The answer to the last step; None while it is late. What is late already is not waited for again."""
        assert self._answer is not None
        patience = max(0.0, until - time.monotonic()) if self._late_since is None else 0.0
        await asyncio.wait({self._answer}, timeout=patience)
        if not self._answer.done():
            self._late_since = self._late_since or time.monotonic()
            return None
        answer, self._answer, self._late_since = self._answer, None, None
        proposal = answer.result()
        self._is_open = True
        return proposal

    async def _exchange(self, *messages: draft_pb2.ProposeRequest) -> Proposal:
        return wire.proposal_from_proto(await self._lane.ask(*messages))


def _forget(answer: asyncio.Task[Proposal]) -> None:
    if not answer.cancelled():
        answer.exception()


def check_proposal(
    proposal: Proposal, base_length: int, most: int, vocabulary_size: int, *, with_token_logits: bool
) -> None:
    """Refuse a proposal that the target could not verify, or no rule could decide on.

    Raises:
        ProtocolError: it extends another sequence, is too long, holds ids that are none, lacks the logits that were
            asked for, or tells distributions that its tokens cannot have been drawn from.
    """
    if proposal.base_length != base_length:
        raise ProtocolError(
            f"draft service: its proposal extends {proposal.base_length} tokens; it must extend {base_length}"
        )
    if len(proposal) > most:
        raise ProtocolError(
            f"draft service: it proposed {len(proposal)} tokens; at most {most} were asked for"
        )
    unknown = next((token_id for token_id in proposal.token_ids if not 0 <= token_id < vocabulary_size), None)
    if unknown is not None:
        raise ProtocolError(
            f"draft service: it proposed token id {unknown}; ids must be in 0..{vocabulary_size - 1}"
        )
    if with_token_logits and proposal.token_ids and proposal.token_logits is None:
        raise ProtocolError("draft service: it told no logits of its tokens; they were asked for")
    for token_id, distribution in zip(proposal.token_ids, proposal.distributions, strict=False):
        _check_distribution(token_id, distribution, vocabulary_size)


def _check_distribution(token_id: int, distribution: DraftDistribution, vocabulary_size: int) -> None:
    if isinstance(distribution, DenseLogits):
        raise ProtocolError(
            "draft service: it told a whole distribution; only its most probable tokens were asked for"
        )
    support = distribution.token_ids
    if token_id not in support:
        raise ProtocolError(
            f"draft service: it proposed token id {token_id}, to which its own distribution gives no probability"
        )
    if support.min() < 0 or support.max() >= vocabulary_size:
        raise ProtocolError(
            f"draft service: it told the probability of an unknown token; ids must be in 0..{vocabulary_size - 1}"
        )

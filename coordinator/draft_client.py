"""A draft service, as the coordinator sees it. Whatever goes wrong there costs the speed-up, never the request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import grpc.aio

from coordinator.completion import Completion
from coordinator.observer import NO_OBSERVER, StreamObserver
from coordinator.remote_sequence import RemoteSequence
from tandem.channels import errors_of, finish_stream
from tandem.errors import ProtocolError, ServiceUnavailableError, TandemError
from tandem.traffic import counted
from tandem.types import DenseLogits, DraftDistribution, DraftOptions, ModelInfo, Proposal, ProposeStep
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceStub
from tandem.wire import draft as wire
from tandem.wire.common import model_info_from_proto

logger = logging.getLogger(__name__)


class DraftClient:
    """Calls one draft service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = DraftServiceStub(channel)

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
        deadline_seconds: float | None = None,
        watch: StreamObserver = NO_OBSERVER,
    ) -> DraftSequence:
        """Begin a sequence on it. The stream must be cancelled in the end, whatever happens."""
        stub = DraftServiceStub(counted(self._channel, watch.traffic))
        options = replace(options, traceparent=watch.traceparent)
        return DraftSequence(stub.Propose(timeout=deadline_seconds), options, limits, watch)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What is asked of a draft, and how long for."""

    num_speculative_tokens: int
    """Tokens to propose in a round."""
    vocabulary_size: int
    """The target's; proposed ids must be below it."""
    patience_seconds: float
    """How long a round waits for a proposal before the target goes on alone."""


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
    """Asks a draft service for proposals over one stream, which lives as long as the sequence.

    The first round proposes nothing: the draft reads the prompt while the target does, and the target's own first token
    is not kept waiting. A draft that fails is not asked again; one that is late is passed over until it has answered.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
        options: DraftOptions,
        limits: DraftLimits,
        watch: StreamObserver = NO_OBSERVER,
    ) -> None:
        self._call = call
        self._watch = watch
        self._options = options
        self._limits = limits
        self._remote = RemoteSequence()
        self._answer: asyncio.Task[Proposal] | None = None
        self._opened = False
        self._lost = False
        self._is_late = False

    async def propose(self, completion: Completion) -> Proposal:
        """Tokens that may follow, fewer than the completion has room for; none when the draft is late or lost."""
        nothing = Proposal(completion.length)
        count = min(self._limits.num_speculative_tokens, completion.room - 1)
        if self._lost or count <= 0:
            return nothing
        try:
            if not self._opened:
                self._opened = True
                self._ask(completion, 0, opening=True)
                return nothing
            if self._answer is not None and await self._awaited() is None:
                return nothing  # an earlier step is still unanswered
            self._ask(completion, count)
            proposal = await self._awaited()
            if proposal is None:
                return nothing
            check_proposal(proposal, completion.length, count, self._limits.vocabulary_size)
            return proposal
        except TandemError as error:
            self._lost = True
            self._watch.ended(error)
            logger.warning(
                "draft lost; the target goes on alone",
                extra={"request_id": self._options.request_id, "error": str(error)},
            )
            return nothing

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if self._answer is None and self._opened and not self._lost:
            await finish_stream(self._call, wire.finish_to_proto())

    def cancel(self) -> None:
        """Drop the stream, whatever it is doing. A call that is dropped without this is never collected."""
        self._call.cancel()
        self._watch.ended()
        if self._answer is not None and not self._answer.cancel() and not self._answer.cancelled():
            self._answer.exception()  # nobody else will ask for it

    def _ask(self, completion: Completion, count: int, *, opening: bool = False) -> None:
        step = ProposeStep(self._remote.delta_to(completion.token_ids), count)
        self._answer = asyncio.create_task(self._exchange(step, opening))
        self._is_late = False

    async def _awaited(self) -> Proposal | None:
        """The answer to the last step; None while it is late. What is late already is not waited for again."""
        assert self._answer is not None
        await asyncio.wait({self._answer}, timeout=0 if self._is_late else self._limits.patience_seconds)
        self._is_late = not self._answer.done()
        if self._is_late:
            return None
        answer, self._answer = self._answer, None
        return answer.result()

    async def _exchange(self, step: ProposeStep, opening: bool) -> Proposal:
        with errors_of("draft service"):
            if opening:
                await self._call.write(wire.options_to_proto(self._options))
            await self._call.write(wire.step_to_proto(step))
            response = await self._call.read()
        if not isinstance(response, draft_pb2.ProposeResponse):
            raise ServiceUnavailableError("draft service: it ended the stream")
        return wire.proposal_from_proto(response)


def check_proposal(proposal: Proposal, base_length: int, most: int, vocabulary_size: int) -> None:
    """Refuse a proposal that the target could not verify, or no rule could decide on.

    Raises:
        ProtocolError: it extends another sequence, is too long, holds ids that are none, or tells distributions that
            its tokens cannot have been drawn from.
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

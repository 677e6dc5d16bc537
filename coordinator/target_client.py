"""A target service, as the coordinator sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc.aio

from coordinator.completion import Completion
from coordinator.lane import Lane
from coordinator.observer import NO_OBSERVER, StreamObserver
from coordinator.remote_sequence import RemoteSequence
from coordinator.row_checks import check_rows
from coordinator.streams import Methods, Streams
from tandem.channels import errors_of
from tandem.errors import ProtocolError, TandemError
from tandem.types import (
    IntArray,
    ModelInfo,
    Proposal,
    RowKind,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire import target as wire
from tandem.wire.common import model_info_from_proto


class TargetClient:
    """Calls one target service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = TargetServiceStub(channel)
        self._streams = Streams(
            Methods(
                service="target service",
                open_one=channel.stream_stream("/tandem.v1.TargetService/Verify"),
                read=target_pb2.VerifyResponse.FromString,
                open_many=channel.stream_stream("/tandem.v1.TargetService/VerifyMany"),
                message=lambda parts: target_pb2.VerifyManyRequest(parts=parts),
                read_many=target_pb2.VerifyManyResponse.FromString,
            )
        )

    async def model_info(self) -> ModelInfo:
        """What its model is.

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

    def sequence(
        self,
        options: TargetOptions,
        rows: RowChoice,
        watch: StreamObserver = NO_OBSERVER,
    ) -> TargetSequence:
        """Begin a sequence on it. It must be cancelled in the end, whatever happens."""
        lane = self._streams.lane(watch.traffic)
        return TargetSequence(lane, replace(options, traceparent=watch.traceparent), rows, watch)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Which rows the acceptance rule of a request needs."""

    kind: RowKind
    supports: Callable[[Proposal], tuple[IntArray, ...]]
    """The support of each row, for support rows."""
    vocabulary_size: int
    """The target's; the ids that it says must be below it, and dense rows as wide."""
    with_statistics: bool = False

    def kind_for(self, proposal: Proposal) -> RowKind:
        """With nothing proposed, all that a support row is asked for is a sample of the target, as a token row is."""
        needs_sample_only = not proposal.token_ids and not self.with_statistics
        return RowKind.TOKEN if self.kind is RowKind.SUPPORT and needs_sample_only else self.kind


class TargetSequence:
    """Asks a target service for rows, for as long as the sequence stays there."""

    def __init__(
        self,
        lane: Lane[target_pb2.VerifyResponse],
        options: TargetOptions,
        rows: RowChoice,
        watch: StreamObserver = NO_OBSERVER,
    ) -> None:
        self._lane = lane
        self._watch = watch
        self._options = options
        self._rows = rows
        self._remote = RemoteSequence()
        self.is_new = True
        """Whether it has yet to answer for the first time."""

    @property
    def was_asked(self) -> bool:
        """Whether the service may have seen a step: then what ended the sequence may be the step's fault."""
        return self._lane.was_sent

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """The target's row at each position of the proposal, and at the one after it.

        Raises:
            TandemError: the service failed, refused, or answered nonsense. It is of no use any more.
        """
        kind = self._rows.kind_for(proposal)
        step = VerifyStep(
            delta=self._remote.delta_to(completion.token_ids, proposal.token_ids),
            row_kind=kind,
            row_count=len(proposal) + 1,
            supports=self._rows.supports(proposal) if kind is RowKind.SUPPORT else (),
            with_statistics=self._rows.with_statistics,
        )
        try:
            verification = await self._exchange(step, completion.length)
        except TandemError as error:
            self._watch.ended(error)
            raise
        self.is_new = False
        return verification

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if not self.is_new:
            await self._lane.finish(wire.finish_to_proto())

    def cancel(self) -> None:
        """Drop it, whatever is being done for it."""
        self._lane.cancel()
        self._watch.ended()

    async def _exchange(self, step: VerifyStep, base_length: int) -> Verification:
        opening = (wire.options_to_proto(self._options),) if self.is_new else ()
        response = await self._lane.ask(*opening, wire.step_to_proto(step))
        if response.base_length != base_length:
            raise ProtocolError(
                f"target service: it answered for {response.base_length} tokens; it was asked for {base_length}"
            )
        verification = wire.verification_from_proto(response, step)
        check_rows(verification, self._rows.vocabulary_size, with_statistics=step.with_statistics)
        return verification

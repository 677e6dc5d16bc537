"""A draft service, as the coordinator sees it. A failing draft costs the speed-up, never the request."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio

from coordinator.decoding.completion import Completion
from coordinator.telemetry.observer import NO_OBSERVER, StreamObserver
from coordinator.transport.draft_sequence import DraftSequence
from coordinator.transport.proposal_checks import DraftLimits
from coordinator.transport.stream_choice import Methods, StreamChoice
from tandem.rpc.channels import errors_of
from tandem.speculation_state import SpeculationState
from tandem.types import DraftOptions, ModelInfo, Proposal
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceStub
from tandem.wire import draft as wire
from tandem.wire.common import model_info_from_proto


class DraftClient:
    """Calls one draft service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = DraftServiceStub(channel)
        self._streams: StreamChoice[wire.Answer] = StreamChoice(
            Methods(
                service="draft service",
                open_one=channel.stream_stream("/tandem.v1.DraftService/Propose"),
                read=draft_pb2.ProposeResponse.FromString,
                open_many=channel.stream_stream("/tandem.v1.DraftService/ProposeMany"),
                message=lambda parts: draft_pb2.ProposeManyRequest(parts=parts),
                read_many=draft_pb2.ProposeManyResponse.FromString,
                read_columns=wire.columns_from_proto,
            )
        )

    async def model_info(self) -> ModelInfo:
        """The draft service's model, or its drafting method.

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
        observer: StreamObserver = NO_OBSERVER,
    ) -> DraftSequence:
        """Begin a sequence on it. The caller must cancel the sequence in the end, whatever happens."""
        stream = self._streams.stream(observer.traffic)
        options = replace(options, traceparent=observer.traceparent, takes_columns=True)
        return DraftSequence(stream, options, limits, observer)


class NoDrafter:
    """Proposes nothing: the target alone."""

    def __init__(self, reason: str = "") -> None:
        """
        Args:
            reason: Why no draft proposes.
        """
        self.speculation_state = SpeculationState(is_on=False, num_speculative_tokens=0, reason=reason)

    async def propose(self, completion: Completion) -> Proposal:
        """An empty proposal."""
        return Proposal(completion.length)

    async def finish(self) -> None:
        """Do nothing: there is no sequence to end."""

    def release(self) -> None:
        """Do nothing: there is no draft to leave."""

    def cancel(self) -> None:
        """Do nothing: there is no stream to drop."""

"""DraftService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from draft_service.proposers import Proposer
from tandem.serving.interceptors import Context
from tandem.serving.streams import MultiplexedStreams, answered, opening, steps
from tandem.telemetry.streams import NO_SERVICE_OBSERVER, ServiceObserver
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceServicer
from tandem.wire import draft as wire
from tandem.wire.common import model_info_to_proto
from tandem.wire.draft import outcomes_to_proto


class DraftServicer(DraftServiceServicer):
    """Lets coordinators ask for proposals."""

    proposer: Proposer
    """Set before the server lets calls through."""

    def __init__(self, observer: ServiceObserver = NO_SERVICE_OBSERVER) -> None:
        self._observer = observer
        self.shared = MultiplexedStreams()
        """Entry of sequences that share a stream."""

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """One sequence, for as long as the stream lives."""
        options = wire.options_from_proto((await opening(request_iterator)).open)
        with self._observer.stream(options.request_id, options.traceparent) as stream:
            async with self.proposer.sequence(options) as sequence:
                stream.opened()

                async def answer(request: draft_pb2.ProposeRequest) -> draft_pb2.ProposeResponse | None:
                    stream.step_arrived()
                    proposal = await sequence.propose(wire.step_from_proto(request.step))
                    stream.answered(0 if proposal is None else len(proposal))
                    if proposal is None:
                        return None
                    return wire.proposal_to_proto(proposal, with_columns=options.takes_columns)

                answers = answered(steps(request_iterator), answer, sequence.pushed, outcomes_to_proto)
                async with aclosing(answers):
                    async for response in answers:
                        yield response

    async def ProposeMany(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeManyRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeManyResponse]:
        """Many sequences, each as on a stream of its own."""
        many = self.shared.serve(
            request_iterator,
            lambda requests: self.Propose(requests, context),
            draft_pb2.ProposeRequest.FromString,
        )
        async with aclosing(many) as answers:
            async for parts in answers:
                yield wire.many_to_proto(parts)

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Information about the model."""
        return draft_pb2.DraftServiceGetModelInfoResponse(
            model_info=model_info_to_proto(self.proposer.model_info)
        )

"""TargetService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from tandem.serving.interceptors import Context
from tandem.serving.streams import MultiplexedStreams, opening, steps
from tandem.telemetry.streams import NO_SERVICE_OBSERVER, ServiceObserver
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceServicer
from tandem.wire import target as wire
from tandem.wire.common import model_info_to_proto

if TYPE_CHECKING:
    from target_service.verifier import Verifier

_PART_BYTES = 1 << 20


class TargetServicer(TargetServiceServicer):
    """Lets coordinators verify proposals."""

    verifier: Verifier
    """Set before the server lets calls through."""

    def __init__(self, observer: ServiceObserver = NO_SERVICE_OBSERVER) -> None:
        self._observer = observer
        self.shared = MultiplexedStreams()
        """Entry of sequences that share a stream."""

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """One sequence, for as long as the stream lives."""
        options = wire.options_from_proto((await opening(request_iterator)).open)
        with self._observer.stream(options.request_id, options.traceparent) as stream:
            async with self.verifier.sequence(options) as sequence:
                stream.opened()
                async for request in steps(
                    request_iterator, lambda last: sequence.keep(wire.kept_from_proto(last.finish))
                ):
                    stream.step_arrived()
                    verification = await sequence.verify(wire.step_from_proto(request.step))
                    stream.answered(len(verification.rows))
                    yield wire.verification_to_proto(verification, with_columns=options.takes_columns)

    async def VerifyMany(
        self, request_iterator: AsyncIterator[target_pb2.VerifyManyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyManyResponse]:
        """Many sequences, each as on a stream of its own."""
        many = self.shared.serve(
            request_iterator,
            lambda requests: self.Verify(requests, context),
            target_pb2.VerifyRequest.FromString,
        )
        async with aclosing(many) as answers:
            async for parts in answers:
                yield wire.many_to_proto(parts)

    async def GetModelInfo(
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        """Information about the model."""
        return target_pb2.TargetServiceGetModelInfoResponse(
            model_info=model_info_to_proto(self.verifier.model_info)
        )

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        """The tokenizer's files, in parts."""
        for path in self.verifier.tokenizer_files:
            content = path.read_bytes()
            for start in range(0, len(content), _PART_BYTES):
                yield target_pb2.GetTokenizerResponse(
                    file_name=path.name, content=content[start : start + _PART_BYTES]
                )

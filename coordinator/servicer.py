"""GenerationService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from coordinator.completions import Completions
from tandem.serving.handlers import Context, traceparent_of
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import GenerationServiceServicer
from tandem.wire.generation import chunk_to_proto, request_from_proto


class GenerationServicer(GenerationServiceServicer):
    """Streams completions to clients."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """One completion, piece by piece."""
        chunks = self._completions.complete(
            request_from_proto(request), context.time_remaining(), traceparent=traceparent_of(context)
        )
        # A call that is cancelled between two chunks must not leave its streams to the garbage collector.
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk_to_proto(chunk)

"""A GenerationService that implements `Generate` alone."""

from __future__ import annotations

import grpc

from tandem.serving.interceptors import Context
from tandem.v1 import generation_pb2, generation_pb2_grpc


class GenerateOnly(generation_pb2_grpc.GenerationServiceServicer):
    """Base class of test servicers. The generated type stubs declare every method abstract, so one must define all."""

    async def RenderChat(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: generation_pb2.RenderChatRequest, context: Context
    ) -> generation_pb2.RenderChatResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this servicer renders no chats")

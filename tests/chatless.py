"""A GenerationService of which a test needs `Generate` alone."""

from __future__ import annotations

from typing import Any

from tandem.v1 import generation_pb2, generation_pb2_grpc


class Chatless(generation_pb2_grpc.GenerationServiceServicer):
    """Takes no chats."""

    async def RenderChat(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: generation_pb2.RenderChatRequest, context: Any
    ) -> generation_pb2.RenderChatResponse:
        raise NotImplementedError

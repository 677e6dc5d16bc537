"""GenerationService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict

from coordinator.http.chat import Chats
from coordinator.requests.admission import peer_of_grpc
from coordinator.requests.arrival import UnparsedRequest, parsed
from coordinator.requests.runner import RequestRunner
from tandem.serving.interceptors import Context, traceparent_of
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import GenerationServiceServicer
from tandem.wire.generation import chat_from_proto, chat_prompt_to_proto, chunk_to_proto, request_from_proto


class GenerationServicer(GenerationServiceServicer):
    """Streams completions to clients."""

    def __init__(self, completions: RequestRunner, chats: Chats) -> None:
        self._completions = completions
        self._chats = chats

    async def Generate(
        self, request: generation_pb2.GenerateRequest | UnparsedRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        message = await parsed(request, self._completions)
        chunks = self._completions.complete(
            request_from_proto(message),
            context.time_remaining(),
            traceparent=traceparent_of(context),
            peer=peer_of_grpc(context.peer()),
        )
        # A call that is cancelled between two chunks must not leave its streams to the garbage collector.
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk_to_proto(chunk)

    async def RenderChat(
        self, request: generation_pb2.RenderChatRequest | UnparsedRequest, context: Context
    ) -> generation_pb2.RenderChatResponse:
        completions = self._completions
        message = await parsed(request, completions)
        messages = [asdict(each) for each in chat_from_proto(message)]
        prompt = await self._chats.prompt(messages, completions.models, completions.bounds)
        return chat_prompt_to_proto(prompt)

"""The Python client.

    async with Client("127.0.0.1:50051") as client:
        async for chunk in client.generate("def main():", max_tokens=64):
            print(chunk.text, end="")

Leaving the loop cancels the request on every service. `tandem.clients.sync` is the same without async.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.clients.advice import coordinator_errors
from tandem.clients.options import Completed, Options, Prompt, as_message, as_request, joined
from tandem.clients.retries import Retries, Tries
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.types import ChatMessage, Chunk
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import GenerationServiceStub
from tandem.wire.generation import chat_prompt_from_proto, chat_to_proto, chunk_from_proto

DEFAULT_ADDRESS = "127.0.0.1:50051"

_POLL_SECONDS = 0.1


class Client:
    """Talks to a coordinator."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        credentials: Credentials = PLAIN,
        *,
        retries: Retries = Retries(),  # noqa: B008 - it never changes
    ) -> None:
        """Connect on first use.

        Args:
            address: host:port of the coordinator.
            credentials: TLS and the token, where it asks for them.
            retries: How often a request that nothing was delivered of is tried again.

        Raises:
            ConfigurationError: a file of the credentials cannot be read, or makes no sense.
        """
        self.address = address
        self._retries = retries
        self._channel = open_channel(address, credentials=credentials)
        self._stub = GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests still running are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion. The last chunk carries the summary.

        Args:
            prompt: Text, token ids, or a complete `GenerationRequest`.
            timeout_seconds: Time limit of the whole call, including waits between retries.
            options: Fields of `GenerationRequest`.

        Raises:
            TandemError: the coordinator refused or failed; the error's class says which.
        """
        message = as_message(as_request(prompt, options))
        tries = Tries(self._retries, timeout_seconds, f"coordinator {self.address}")
        while True:
            try:
                async with aclosing(self._try(message, tries)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except TandemError as error:
                wait_seconds = tries.wait_seconds(error)
            else:
                return
            await asyncio.sleep(wait_seconds)

    async def complete(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Completed:
        """A whole completion; arguments and errors are those of `generate`."""
        return joined(
            [chunk async for chunk in self.generate(prompt, timeout_seconds=timeout_seconds, **options)]
        )

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], *, timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """The prompt that a chat makes by the model's chat template, as token ids for `generate`.

        Raises:
            InvalidRequestError: the model has no chat template, or it does not take these messages.
            TandemError: the coordinator refused or failed; the error's class says which.
        """
        with coordinator_errors(self.address):
            response = await self._stub.RenderChat(chat_to_proto(messages), timeout=timeout_seconds)
        return chat_prompt_from_proto(response)

    async def _try(self, message: generation_pb2.GenerateRequest, tries: Tries) -> AsyncGenerator[Chunk]:
        call = self._stub.Generate(message, timeout=tries.remaining_seconds)
        try:
            with coordinator_errors(self.address):
                async for response in call:
                    chunk = chunk_from_proto(response)
                    tries.delivered += len(chunk.token_ids)
                    yield chunk
        finally:
            call.cancel()

    async def wait_until_ready(self, timeout_seconds: float) -> None:
        """Return once the coordinator serves.

        Raises:
            ServiceUnavailableError: it does not within the time.
        """
        if not await serves(self._channel, timeout_seconds):
            raise ServiceUnavailableError(
                f"coordinator {self.address}: not ready within {timeout_seconds:g} s"
            )


async def serves(channel: grpc.aio.Channel, timeout_seconds: float) -> bool:
    """True if the server behind a channel says within the time that it serves, by the standard health protocol."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return True
                except grpc.aio.AioRpcError:
                    pass  # not reachable yet; the time limit decides
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return False

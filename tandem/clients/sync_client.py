"""The Python client without async.

    with SyncClient("127.0.0.1:50051") as client:
        for chunk in client.generate("def main():", max_tokens=64):
            print(chunk.text, end="")

Leaving the loop, by Ctrl-C too, cancels the request on every service. It may be shared by threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Unpack, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.clients.client import (
    DEFAULT_ADDRESS,
    POLL_SECONDS,
    Completed,
    Options,
    Prompt,
    Retries,
    Tries,
    as_request,
    coordinator_errors,
    join_chunks,
)
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.model.types import ChatMessage, Chunk
from tandem.rpc.channels import open_sync_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import GenerationServiceStub
from tandem.wire.generation import chat_prompt_from_proto, chat_to_proto, chunk_from_proto


class SyncClient:
    """Talks to a coordinator."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        credentials: Credentials = PLAIN,
        *,
        retries: Retries = Retries(),  # noqa: B008 - it never changes
    ) -> None:
        """As `tandem.clients.client.Client`."""
        self.address = address
        self._retries = retries
        self._channel = open_sync_channel(address, credentials)
        # The stubs' types know awaited channels only.
        self._stub: Any = GenerationServiceStub(cast(Any, self._channel))

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Iterator[Chunk]:
        """As `tandem.clients.client.Client.generate`."""
        request = as_request(prompt, options)
        tries = Tries(self._retries, timeout_seconds, f"coordinator {self.address}")
        while True:
            try:
                yield from self._try(tries.message(request), tries)
            except TandemError as error:
                if tries.has_ended:
                    return
                wait_seconds = tries.wait_seconds(error)
            else:
                return
            time.sleep(wait_seconds)

    def complete(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Completed:
        """As `tandem.clients.client.Client.complete`."""
        return join_chunks([*self.generate(prompt, timeout_seconds=timeout_seconds, **options)])

    def chat_prompt(
        self, messages: Sequence[ChatMessage], *, timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """As `tandem.clients.client.Client.chat_prompt`."""
        with coordinator_errors(self.address):
            response = self._stub.RenderChat(chat_to_proto(messages), timeout=timeout_seconds)
        return chat_prompt_from_proto(response)

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """As `tandem.clients.client.Client.wait_until_ready`."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        end = time.monotonic() + timeout_seconds
        while (remaining := end - time.monotonic()) > 0.0:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=remaining, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # not reachable yet; the time limit decides
            time.sleep(min(POLL_SECONDS, remaining))
        raise ServiceUnavailableError(f"coordinator {self.address}: not ready within {timeout_seconds:g} s")

    def _try(self, message: generation_pb2.GenerateRequest, tries: Tries) -> Iterator[Chunk]:
        call = self._stub.Generate(message, timeout=tries.remaining_seconds)
        try:
            with coordinator_errors(self.address):
                for response in call:
                    chunk = chunk_from_proto(response)
                    tries.received(chunk)
                    yield chunk
        finally:
            call.cancel()

"""The Python client.

    async with Client("127.0.0.1:50051") as client:
        async for chunk in client.generate(GenerationRequest("def main():", max_tokens=64)):
            ...

Leaving the loop cancels the request on every service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.channels import errors_of, open_channel
from tandem.credentials import PLAIN, Credentials
from tandem.errors import DeadlineError, ServiceUnavailableError
from tandem.types import Chunk, GenerationRequest
from tandem.v1.generation_pb2_grpc import GenerationServiceStub
from tandem.wire.generation import chunk_from_proto, request_to_proto

DEFAULT_ADDRESS = "127.0.0.1:50051"

_POLL_SECONDS = 0.1


class Client:
    """Talks to a coordinator."""

    def __init__(self, address: str = DEFAULT_ADDRESS, credentials: Credentials = PLAIN) -> None:
        self._address = address
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
        self, request: GenerationRequest, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream a completion. The last chunk carries the summary.

        Raises:
            TandemError: the coordinator refused or failed; the branch says which.
        """
        call = self._stub.Generate(request_to_proto(request), timeout=timeout_seconds)
        delivered = 0
        try:
            with errors_of(f"coordinator {self._address}"):
                async for response in call:
                    chunk = chunk_from_proto(response)
                    delivered += len(chunk.token_ids)
                    yield chunk
        except DeadlineError:
            if timeout_seconds is None:
                raise
            # gRPC's own clock may strike before the coordinator has had its say.
            raise DeadlineError(
                f"coordinator {self._address}: the request took longer than the {timeout_seconds:g} s it was given; "
                f"{delivered} tokens were delivered"
            ) from None
        finally:
            call.cancel()

    async def wait_until_ready(self, timeout_seconds: float) -> None:
        """Return once the coordinator serves.

        Raises:
            ServiceUnavailableError: it does not within the time.
        """
        if not await serves(self._channel, timeout_seconds):
            raise ServiceUnavailableError(
                f"coordinator {self._address}: not ready within {timeout_seconds:g} s"
            )


async def serves(channel: grpc.aio.Channel, timeout_seconds: float) -> bool:
    """Whether the server behind a channel says within the time that it serves, by the standard health protocol."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return True
                except grpc.aio.AioRpcError:
                    pass  # not there yet; the time limit decides
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return False

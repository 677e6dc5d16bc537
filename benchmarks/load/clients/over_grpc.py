"""Tandem's own client of a coordinator."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.load.clients.connection import Connection, LoadRequest
from benchmarks.load.figures import Served
from tandem.client import Client, Retries
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.types import GenerationRequest


@asynccontextmanager
async def grpc_connection(address: str, credentials: Credentials = PLAIN) -> AsyncIterator[Connection]:
    """Connect to a coordinator.

    Args:
        address: host:port.
        credentials: How to connect.
    """
    # An answer that comes at the second attempt would hide the refusal of the first.
    async with Client(address, credentials, retries=Retries(attempts=1)) as client:
        yield _GrpcConnection(client)


class _GrpcConnection:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def complete(self, request: LoadRequest, served: Served) -> None:
        """See `Connection`."""
        wanted = GenerationRequest(
            request.prompt,
            max_tokens=request.output_tokens,
            temperature=request.temperature,
            ignore_eos=True,
        )
        async for chunk in self._client.generate(wanted):
            if chunk.token_ids:
                served.chunks.append(time.perf_counter())
                served.output_tokens += len(chunk.token_ids)

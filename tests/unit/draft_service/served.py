"""A proposer behind the real servicer, and sequences on it as a coordinator would hold them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc.aio

from draft_service.proposers import Proposer
from draft_service.servicer import DraftServicer
from tandem.rpc.channels import failure
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import new_server
from tandem.settings import ServerSettings
from tandem.types import Delta, DraftOptions, Finish, Proposal, ProposeStep, RowKind, SamplingParams
from tandem.v1.draft_pb2 import ProposeResponse
from tandem.v1.draft_pb2_grpc import DraftServiceStub, add_DraftServiceServicer_to_server
from tandem.wire import draft as wire
from tandem.wire.status import Ending


@asynccontextmanager
async def served(proposer: Proposer) -> AsyncIterator[DraftServiceStub]:
    """A stub of a server in this process."""
    servicer = DraftServicer()
    servicer.proposer = proposer
    server = new_server(ServerSettings(), RunningCalls())
    add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await proposer.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield DraftServiceStub(channel)
    finally:
        await server.stop(None)
        await proposer.close()


class Stream:
    """One sequence."""

    def __init__(self, stub: DraftServiceStub) -> None:
        self.call = stub.Propose()

    async def say(self, request: wire.Request) -> None:
        # As coordinators do: when the service has refused the opening already, reading says why.
        with suppress(asyncio.InvalidStateError):
            await self.call.write(wire.requests_to_proto([(1, request)]))

    async def answer(self) -> Proposal:
        """The next answer.

        Raises:
            TandemError: the sequence has ended.
        """
        response = await self.call.read()
        assert isinstance(response, ProposeResponse)
        ((_, answer),) = wire.answers_from_proto(response)
        if isinstance(answer, Ending):
            raise failure("draft service", answer)
        assert isinstance(answer, Proposal)
        return answer

    async def propose(self, base_length: int, token_ids: Sequence[int], token_count: int) -> Proposal:
        await self.say(ProposeStep(Delta(base_length, token_ids), token_count))
        return await self.answer()

    async def finish(self) -> None:
        await self.say(Finish(0))
        response = await self.call.read()
        assert isinstance(response, ProposeResponse)
        assert [end.code for end in response.ends] == [0]


@asynccontextmanager
async def opened(
    stub: DraftServiceStub, max_length: int = 0, row_kind: RowKind = RowKind.TOKEN
) -> AsyncIterator[Stream]:
    """A sequence that is dropped at the end unless it was finished."""
    stream = Stream(stub)
    try:
        await stream.say(
            DraftOptions("a request", SamplingParams(), max_length=max_length, row_kind=row_kind)
        )
        yield stream
    finally:
        stream.call.cancel()

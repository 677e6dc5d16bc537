"""Both Python clients over a coordinator whose services count: what they ask, what they answer, when they try again."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, get_type_hints

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from pydantic import SecretStr

from tandem.clients.aio import Client
from tandem.clients.options import Completed, Options
from tandem.clients.retries import NO_RETRIES, Retries
from tandem.clients.sync import SyncClient
from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from tandem.rpc.credentials import Credentials
from tandem.serving.calls import RunningCalls
from tandem.serving.interceptors.handlers import Context
from tandem.serving.server import new_server
from tandem.settings import ServerSettings
from tandem.types import Chunk, FinishReason, GenerationRequest, SpeculationStats, Summary
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tandem.wire.generation import chunk_to_proto
from tandem.wire.status import Ending
from tests.chatless import Chatless
from tests.paths import ROOT
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget, cluster, serving

SECONDS = 20.0
TOKEN = "a-token-of-many-characters"
BOTH = pytest.mark.parametrize("kind", ["async", "sync"])
AWAY, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED

Ask = Callable[..., Any]
"""`complete` of either client, as something to await."""


def asker(kind: str, address: str, **options: Any) -> Ask:
    """`complete` of the async client, or of its twin on a thread."""

    async def ask(*arguments: Any, **values: Any) -> Completed:
        async with Client(address, **options) as client:
            return await client.complete(*arguments, **values)

    def work(*arguments: Any, **values: Any) -> Completed:
        with SyncClient(address, **options) as client:
            return client.complete(*arguments, **values)

    async def ask_on_a_thread(*arguments: Any, **values: Any) -> Completed:
        return await asyncio.to_thread(work, *arguments, **values)

    return ask if kind == "async" else ask_on_a_thread


@asynccontextmanager
async def address_of(target: FakeTarget, draft: FakeDraft | None = None) -> AsyncIterator[str]:
    async with cluster(target, draft) as client:
        yield client.address


def test_options_are_the_fields_of_a_request() -> None:
    fields = get_type_hints(GenerationRequest)
    del fields["prompt"]
    options = get_type_hints(Options)
    assert set(options) == set(fields)
    # Stop strings and ids may come in any sequence, and one stop string by itself.
    assert {name for name in options if options[name] != fields[name]} == {"stop", "stop_token_ids"}


@BOTH
async def test_a_prompt_comes_in_any_form(kind: str) -> None:
    async with address_of(FakeTarget(), FakeDraft()) as address:
        ask = asker(kind, address)
        completed = await ask((10,), max_tokens=5, temperature=0.0, logprobs=1)
        assert completed.token_ids == (11, 12, 13, 14, 15)
        assert completed.finish_reason is FinishReason.LENGTH
        assert completed.speculation.accepted == sum(completed.drafted) > 0
        assert [position.top_token_ids for position in completed.logprobs] == [
            (n,) for n in completed.token_ids
        ]
        request = GenerationRequest((10,), max_tokens=3)
        assert (await ask(request)).token_ids == (11, 12, 13)
        assert (await ask(request, max_tokens=2)).token_ids == (11, 12)
        assert (await ask([10, 11], max_tokens=1)).token_ids == (12,)
        assert (await ask("a", max_tokens=1)).summary.prompt_tokens == 1
        third = (await ask((10,), max_tokens=3)).text
        assert (await ask((10,), max_tokens=30, stop=third[-1:])).text == third[: third.index(third[-1:])]


@BOTH
async def test_refusals(kind: str) -> None:
    async with address_of(FakeTarget()) as address:
        ask = asker(kind, address)
        with pytest.raises(InvalidRequestError, match=r"temperature is -1\.0"):
            await ask("x", temperature=-1.0)
        with pytest.raises(InvalidRequestError, match=r"the request cannot be sent|is \d+; it must be from"):
            await ask("x", seed=2**64)
        with pytest.raises(TypeError, match="no_such_option"):
            await ask("x", no_such_option=1)


@BOTH
async def test_the_time_of_a_request_is_kept(kind: str) -> None:
    target = FakeTarget()
    target.step_seconds = 0.2
    async with address_of(target) as address:
        with pytest.raises(
            DeadlineError, match=r"took longer than the 0\.5 s it was given; \d tokens? (was|were) delivered"
        ):
            await asker(kind, address)((10,), timeout_seconds=0.5)
        await until(lambda: not target.running, SECONDS)


class Moody(Chatless):
    """A coordinator that fails in these ways, one after the other, before it answers."""

    def __init__(self, *codes: grpc.StatusCode, after: int = 0, hint: float | None = 0.05) -> None:
        self.codes = list(codes)
        self.asked = 0
        self._after = after
        self._hint = hint

    async def Generate(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.asked += 1
        if self.codes:
            code = self.codes.pop(0)
            for _ in range(self._after):
                yield chunk_to_proto(Chunk("a", (1,), (False,), (1,)))
            await context.abort(code, "later", Ending(code, "later", self._hint).metadata)
        summary = Summary(FinishReason.LENGTH, 1, 1, SpeculationStats(), "r", 1)
        yield chunk_to_proto(Chunk("a", (1,), (False,), (1,), summary))


@asynccontextmanager
async def moody(servicer: Moody) -> AsyncIterator[str]:
    async with serving(
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    ) as (address, _):
        yield address


@BOTH
async def test_what_passes_is_tried_again(kind: str) -> None:
    servicer = Moody(AWAY, FULL, AWAY)
    async with moody(servicer) as address:
        assert (await asker(kind, address)("x")).text == "a"
    assert servicer.asked == 4


@BOTH
@pytest.mark.parametrize(
    ("make", "retries", "error", "asked"),
    [
        (lambda: Moody(AWAY, after=1), Retries(), ServiceUnavailableError, 1),
        (lambda: Moody(*[AWAY] * 9), Retries(first_wait_seconds=0.01), ServiceUnavailableError, 4),
        (lambda: Moody(AWAY), NO_RETRIES, ServiceUnavailableError, 1),
        (lambda: Moody(FULL, hint=None), Retries(), CapacityError, 1),
        (lambda: Moody(FULL, hint=60.0), Retries(), CapacityError, 1),
        (lambda: Moody(grpc.StatusCode.INVALID_ARGUMENT), Retries(), InvalidRequestError, 1),
    ],
    ids=["begun", "bounded", "none wanted", "no hint", "too long", "never"],
)
async def test_what_does_not_is_told(
    kind: str, make: Callable[[], Moody], retries: Retries, error: type[Exception], asked: int
) -> None:
    servicer = make()
    async with moody(servicer) as address:
        with pytest.raises(error):
            await asker(kind, address, retries=retries)("x")
    assert servicer.asked == asked


async def test_leaving_the_loop_cancels_the_request() -> None:
    target = FakeTarget()
    target.step_seconds = 0.02
    async with address_of(target) as address:

        def leave() -> None:
            with SyncClient(address) as client:
                with suppress(KeyboardInterrupt):
                    for _ in client.generate((10,), max_tokens=50):
                        raise KeyboardInterrupt
                # The client is still open: it is the loop's end that ends the request.
                deadline = time.monotonic() + SECONDS
                while target.running:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)

        await asyncio.to_thread(leave)
        async with Client(address) as client:
            async for _ in client.generate((10,), max_tokens=50):
                break
            await until(lambda: not target.running, SECONDS)
    assert target.opened == 2
    assert target.finished == 0


SCRIPT = """
import sys
from tandem.clients.sync import SyncClient
with SyncClient(sys.argv[1]) as client:
    for chunk in client.generate((10,), max_tokens=50):
        print("a piece", flush=True)
"""


async def test_ctrl_c_ends_a_sync_client_at_once() -> None:
    target = FakeTarget()
    target.step_seconds = 0.5
    async with address_of(target) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, address, stdout=PIPE, stderr=PIPE, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(SECONDS):
                assert await process.stdout.readline() == b"a piece\n"
                # It waits for the next piece now.
                process.send_signal(signal.SIGINT)
                _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == -signal.SIGINT
        assert errors.splitlines()[-1] == b"KeyboardInterrupt"
        await until(lambda: not target.running, SECONDS)
        assert target.longest < 16


async def test_one_sync_client_serves_many_threads() -> None:
    async with address_of(FakeTarget(), FakeDraft()) as address:
        with SyncClient(address) as client:
            await asyncio.to_thread(client.wait_until_ready, SECONDS)
            completed = await asyncio.gather(
                *(asyncio.to_thread(client.complete, (n,), max_tokens=4) for n in range(10, 30))
            )
    assert [each.token_ids for each in completed] == [tuple(range(n + 1, n + 5)) for n in range(10, 30)]


@BOTH
async def test_a_coordinator_that_is_not_there(kind: str) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"coordinator 127\.0\.0\.1:1: "):
        await asker(kind, "127.0.0.1:1", retries=Retries(attempts=2))("x")


@asynccontextmanager
async def guarded(servicer: Moody) -> AsyncIterator[str]:
    """A server that asks for the token, and tells what it serves."""
    server = new_server(ServerSettings(auth_token=SecretStr(TOKEN)), RunningCalls())
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    reflection.enable_server_reflection(["tandem.v1.GenerationService", reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@BOTH
async def test_a_token_goes_with_every_call(kind: str) -> None:
    async with guarded(Moody()) as address:
        assert (await asker(kind, address, credentials=Credentials(token=TOKEN))("x")).text == "a"
        with pytest.raises(UnauthenticatedError):
            await asker(kind, address)("x")


def by_reflection(address: str) -> tuple[set[str], str]:
    """What grpcurl does: a call built from nothing but what the server says of itself."""
    with grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, WithToken())
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        service = DescriptorPool(database).FindServiceByName("tandem.v1.GenerationService")
        method = service.methods_by_name["Generate"]
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call: Any = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answered.FromString,
        )
        return names, "".join(response.text for response in call(asked(text="x", max_tokens=5)))


def with_token(continuation: Any, details: Any, request: Any) -> Any:
    """Send the token, with reflection's calls as with ours."""
    return continuation(details._replace(metadata=[("authorization", f"Bearer {TOKEN}")]), request)


class WithToken(grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    intercept_unary_stream = staticmethod(with_token)  # type: ignore[assignment]
    intercept_stream_stream = staticmethod(with_token)  # type: ignore[assignment]


async def test_a_call_can_be_built_from_reflection_alone() -> None:
    async with guarded(Moody()) as address:
        names, text = await asyncio.to_thread(by_reflection, address)
    assert "tandem.v1.GenerationService" in names
    assert text == "a"

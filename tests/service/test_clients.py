"""Both Python clients: options, results, errors, retries, tokens and cancellation."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, get_type_hints

import grpc
import grpc.aio
import pytest

from tandem.clients.client import Client, Completed, Options, Retries
from tandem.clients.sync_client import SyncClient
from tandem.errors import DeadlineError, InvalidRequestError, ServiceUnavailableError, UnauthenticatedError
from tandem.model.types import Chunk, FinishReason, GenerationRequest, SpeculationStats, Summary
from tandem.rpc.credentials import Credentials
from tandem.serving.interceptors import Context
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tandem.wire.generation import chunk_to_proto
from tandem.wire.status import Ending
from tests.end_to_end import processes
from tests.paths import ROOT
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget, GenerateOnly, cluster, paced, serving

SECONDS = 20.0
TOKEN = "a-token-of-many-characters"
BOTH = pytest.mark.parametrize("kind", ["async", "sync"])
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


Complete = Callable[..., Any]
"""`complete` of either client, as something to await."""


def completer(kind: str, address: str, **options: Any) -> Complete:
    """`complete` of the async client, or of its twin on a thread."""

    async def complete(*arguments: Any, **values: Any) -> Completed:
        async with Client(address, **options) as client:
            return await client.complete(*arguments, **values)

    async def complete_on_a_thread(*arguments: Any, **values: Any) -> Completed:
        with SyncClient(address, **options) as client:
            return await asyncio.to_thread(client.complete, *arguments, **values)

    return complete if kind == "async" else complete_on_a_thread


class FlakyCoordinator(GenerateOnly):
    """A coordinator that fails with each of these status codes in turn before it answers."""

    def __init__(self, *codes: grpc.StatusCode, after: int = 0, is_lost_at_the_end: bool = False) -> None:
        self.codes = list(codes)
        self.calls = 0
        self._after = after
        self._is_lost_at_the_end = is_lost_at_the_end

    async def Generate(  # noqa: N802 - gRPC looks a method up by the name that it has in the proto
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.calls += 1
        self.delivered = list(request.delivered_token_ids)
        if self.codes:
            code = self.codes.pop(0)
            for _ in range(self._after):
                yield chunk_to_proto(Chunk("a", (1,), (False,), (1,)))
            await context.abort(code, "later", Ending(code, "later", 0.05).metadata)
        summary = Summary(FinishReason.LENGTH, 1, 1, SpeculationStats(), "r", 1)
        yield chunk_to_proto(Chunk("a", (1,), (False,), (1,), summary))
        if self._is_lost_at_the_end:
            await context.abort(UNAVAILABLE, "lost")


@asynccontextmanager
async def serving_flaky(servicer: FlakyCoordinator, auth_token: str | None = None) -> AsyncIterator[str]:
    """Serve this coordinator; yield the address."""

    register = partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
    async with serving(register, auth_token=auth_token) as (address, _):
        yield address


def test_options_are_the_fields_of_a_request() -> None:
    fields = get_type_hints(GenerationRequest)
    del fields["prompt"]
    options = get_type_hints(Options)
    assert set(options) == set(fields)
    # They may come in any sequence, and one stop string by itself.
    any_sequence = {"stop", "stop_token_ids", "allowed_token_ids", "bad_words"}
    assert {name for name in options if options[name] != fields[name]} == any_sequence


@BOTH
async def test_every_form_of_prompt_works(kind: str) -> None:
    async with cluster(FakeTarget(), FakeDraft()) as client:
        complete = completer(kind, client.address)
        completed = await complete((10,), max_tokens=5, temperature=0.0, logprobs=1)
        assert completed.token_ids == (11, 12, 13, 14, 15)
        assert completed.finish_reason is FinishReason.LENGTH
        assert completed.speculation.accepted == sum(completed.drafted) > 0
        assert [position.top_token_ids for position in completed.logprobs] == [
            (n,) for n in completed.token_ids
        ]
        request = GenerationRequest((10,), max_tokens=3)
        assert (await complete(request)).token_ids == (11, 12, 13)
        assert (await complete(request, max_tokens=2)).token_ids == (11, 12)
        assert (await complete([10, 11], max_tokens=1)).token_ids == (12,)
        assert (await complete("a", max_tokens=1)).summary.prompt_tokens == 1
        third = (await complete((10,), max_tokens=3)).text
        assert (await complete((10,), max_tokens=30, stop=third[-1:])).text == third[
            : third.index(third[-1:])
        ]


@BOTH
async def test_invalid_options_are_refused(kind: str) -> None:
    async with cluster(FakeTarget()) as client:
        complete = completer(kind, client.address)
        with pytest.raises(InvalidRequestError, match=r"temperature is -1\.0"):
            await complete("x", temperature=-1.0)
        with pytest.raises(InvalidRequestError, match=r"the request cannot be sent|is \d+; it must be from"):
            await complete("x", seed=2**64)
        with pytest.raises(TypeError, match="no_such_option"):
            await complete("x", no_such_option=1)


@BOTH
@pytest.mark.parametrize(("step_seconds", "tokens"), [(30.0, "0"), (0.05, r"[1-9]\d*")])
async def test_a_request_ends_at_its_timeout(kind: str, step_seconds: float, tokens: str) -> None:
    """Both before the first token and between two tokens."""
    target = paced(step_seconds)
    sentence = rf"longer than the 0\.5 s it was given; {tokens} tokens? (was|were) delivered"
    async with cluster(target) as client:
        with pytest.raises(DeadlineError, match=sentence):
            await completer(kind, client.address)((10,), timeout_seconds=0.5)
        await until(lambda: not target.running)


async def test_leaving_the_loop_cancels_the_request() -> None:
    target = paced(0.02)
    async with cluster(target) as client:

        def leave() -> None:
            with SyncClient(client.address) as in_sync:
                with suppress(KeyboardInterrupt):
                    for _ in in_sync.generate((10,), max_tokens=50):
                        raise KeyboardInterrupt
                # The client is still open: leaving the loop is what ends the request.
                processes.until(lambda: not target.running, SECONDS)

        await asyncio.to_thread(leave)
        async for _ in client.generate((10,), max_tokens=50):
            break
        await until(lambda: not target.running)
    assert target.opened == 2
    assert target.finished == 0


SCRIPT = """
import sys
from tandem.clients.sync_client import SyncClient
with SyncClient(sys.argv[1]) as client:
    for chunk in client.generate((10,), max_tokens=50):
        print("a chunk", flush=True)
"""


async def test_ctrl_c_ends_a_sync_client_at_once() -> None:
    target = paced(0.5)
    async with cluster(target) as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, client.address, stdout=PIPE, stderr=PIPE, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(SECONDS):
                assert await process.stdout.readline() == b"a chunk\n"
                # The client now waits for the next chunk.
                process.send_signal(signal.SIGINT)
                _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == -signal.SIGINT
        assert errors.splitlines()[-1] == b"KeyboardInterrupt"
        await until(lambda: not target.running)
        assert target.longest < 16


async def test_one_sync_client_serves_many_threads() -> None:
    async with cluster(FakeTarget(), FakeDraft()) as other:
        with SyncClient(other.address) as client:
            await asyncio.to_thread(client.wait_until_ready, SECONDS)
            completed = await asyncio.gather(
                *(asyncio.to_thread(client.complete, (n,), max_tokens=4) for n in range(10, 30))
            )
    assert [each.token_ids for each in completed] == [tuple(range(n + 1, n + 5)) for n in range(10, 30)]


@BOTH
async def test_an_unreachable_coordinator_is_named(kind: str) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"coordinator 127\.0\.0\.1:1: "):
        await completer(kind, "127.0.0.1:1", retries=Retries(attempts=2))("x")


@BOTH
async def test_transient_errors_are_retried(kind: str) -> None:
    servicer = FlakyCoordinator(UNAVAILABLE, EXHAUSTED, UNAVAILABLE)
    async with serving_flaky(servicer) as address:
        assert (await completer(kind, address)("x")).text == "a"
    assert servicer.calls == 4


@BOTH
async def test_a_broken_stream_goes_on_after_what_it_has_delivered(kind: str) -> None:
    servicer = FlakyCoordinator(*[UNAVAILABLE] * 6, after=2)
    async with serving_flaky(servicer) as address:
        completed = await completer(kind, address, retries=Retries(first_wait_seconds=0.01))("x")
    assert (completed.text, completed.token_ids) == ("a" * 13, (1,) * 13)
    assert servicer.delivered == [1] * 12


@BOTH
async def test_a_stream_that_breaks_after_its_summary_is_whole(kind: str) -> None:
    servicer = FlakyCoordinator(is_lost_at_the_end=True)
    async with serving_flaky(servicer) as address:
        completed = await completer(kind, address)("x")
    assert (completed.text, servicer.calls) == ("a", 1)


@BOTH
async def test_a_token_goes_with_every_call(kind: str) -> None:
    async with serving_flaky(FlakyCoordinator(), TOKEN) as address:
        assert (await completer(kind, address, credentials=Credentials(token=TOKEN))("x")).text == "a"
        with pytest.raises(UnauthenticatedError):
            await completer(kind, address)("x")

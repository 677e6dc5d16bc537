"""Both Python clients over a coordinator whose services count: options, results, errors and cancellation."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import get_type_hints

import pytest

from tandem.client import Client, Options, Retries
from tandem.errors import DeadlineError, InvalidRequestError, ServiceUnavailableError
from tandem.sync_client import SyncClient
from tandem.types import FinishReason, GenerationRequest
from tests.paths import ROOT
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget, cluster
from tests.service.flaky_coordinator import BOTH, SECONDS, completer


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
async def test_every_form_of_prompt_works(kind: str) -> None:
    async with address_of(FakeTarget(), FakeDraft()) as address:
        complete = completer(kind, address)
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
    async with address_of(FakeTarget()) as address:
        complete = completer(kind, address)
        with pytest.raises(InvalidRequestError, match=r"temperature is -1\.0"):
            await complete("x", temperature=-1.0)
        with pytest.raises(InvalidRequestError, match=r"the request cannot be sent|is \d+; it must be from"):
            await complete("x", seed=2**64)
        with pytest.raises(TypeError, match="no_such_option"):
            await complete("x", no_such_option=1)


@BOTH
async def test_a_request_ends_at_its_timeout(kind: str) -> None:
    target = FakeTarget()
    target.step_seconds = 0.2
    async with address_of(target) as address:
        with pytest.raises(
            DeadlineError, match=r"took longer than the 0\.5 s it was given; \d tokens? (was|were) delivered"
        ):
            await completer(kind, address)((10,), timeout_seconds=0.5)
        await until(lambda: not target.running, SECONDS)


async def test_leaving_the_loop_cancels_the_request() -> None:
    target = FakeTarget()
    target.step_seconds = 0.02
    async with address_of(target) as address:

        def leave() -> None:
            with SyncClient(address) as client:
                with suppress(KeyboardInterrupt):
                    for _ in client.generate((10,), max_tokens=50):
                        raise KeyboardInterrupt
                # The client is still open: leaving the loop is what ends the request.
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
from tandem.sync_client import SyncClient
with SyncClient(sys.argv[1]) as client:
    for chunk in client.generate((10,), max_tokens=50):
        print("a chunk", flush=True)
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
async def test_an_unreachable_coordinator_is_named(kind: str) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"coordinator 127\.0\.0\.1:1: "):
        await completer(kind, "127.0.0.1:1", retries=Retries(attempts=2))("x")

"""`--workers 2`: two coordinator processes on one port, over scripted services, act as one coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest

from tandem.admin import Stats
from tandem.admin_client import AdminClient
from tandem.client import Client, Retries
from tandem.errors import AbortedError, InvalidRequestError, NotFoundError, ServiceUnavailableError
from tandem.replica import ReplicaState
from tandem.types import GenerationRequest
from tests.end_to_end.processes import (
    Process,
    address_of,
    coordinator,
    descendants,
    is_alive,
    metrics_of,
    read,
    service,
    total,
)
from tests.service.clients import until

pytestmark = pytest.mark.slow

SCRIPTED = "benchmarks.load.fakes"
STREAMS = 12
TOKENS = 200
"""Of a stream that is to run while something happens: some 50 steps, a second or more."""
SECONDS = 60.0


def request(tokens: int) -> GenerationRequest:
    return GenerationRequest("def main():", max_tokens=tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[str, str]]:
    with (
        service(SCRIPTED, "--role", "target", "--step-ms", "20") as target,
        service(SCRIPTED, "--role", "draft", "--step-ms", "5") as draft,
    ):
        yield target.line("ready on "), draft.line("ready on ")


@pytest.fixture(scope="module")
def two(services: tuple[str, str]) -> Iterator[Process]:
    """A coordinator of two workers with HTTP and a Prometheus port."""
    with coordinator(*services, "--workers", "2", "--http-port", "0", "--prometheus-port", "0") as process:
        address_of(process)
        yield process


async def complete(address: str, tokens: int, *, goes_on: bool = True) -> tuple[str, list[int]]:
    """Complete a prompt over a connection of its own."""
    async with Client(address, retries=Retries(goes_on=goes_on)) as client:
        chunks = [chunk async for chunk in client.generate(request(tokens))]
    return "".join(chunk.text for chunk in chunks), [i for chunk in chunks for i in chunk.token_ids]


def workers_of(process: Process) -> list[int]:
    return [pid for pid in descendants(process.pid) if is_alive(pid)]


async def stats_of(address: str) -> Stats:
    async with AdminClient(address) as admin:
        return await admin.stats()


async def test_both_workers_complete_requests_with_the_text_of_one(
    services: tuple[str, str], two: Process
) -> None:
    with coordinator(*services) as alone:
        expected = await complete(address_of(alone), 40)
    address = address_of(two)
    before = await stats_of(address)
    found = await asyncio.gather(*(complete(address, 40) for _ in range(STREAMS)))
    assert all(each == expected for each in found)
    after = await stats_of(address)
    assert after.outcomes.completed - before.outcomes.completed == STREAMS
    assert after.completion_tokens - before.completion_tokens == STREAMS * 40
    assert len(workers_of(two)) == 2


async def test_metrics_and_status_are_those_of_all_whoever_is_asked(two: Process) -> None:
    address = address_of(two)
    await asyncio.gather(*(complete(address, 20) for _ in range(STREAMS)))
    url = f"{two.line('http on ')}"
    tokens = (await stats_of(address)).completion_tokens
    pages = [await asyncio.to_thread(read, f"{url}/metrics") for _ in range(4)]
    for page in pages:
        assert total(page, "tandem_generation_tokens_total") == tokens
        assert total(page, "tandem_coordinator_workers") == 2
        assert total(page, "tandem_replica_ready") == 2
    page = await asyncio.to_thread(metrics_of, two)
    assert total(page, "tandem_generation_tokens_total") == tokens
    status = json.loads(await asyncio.to_thread(read, f"{url}/tandem/status"))
    assert status["state"] == "ready"
    assert len(status["replicas"]) == 2
    assert json.loads(await asyncio.to_thread(read, f"{url}/health")) == {"status": "ok"}


async def test_admin_verbs_reach_the_worker_that_has_the_request(two: Process) -> None:
    address = address_of(two)
    tasks = [asyncio.create_task(complete(address, 20_000)) for _ in range(6)]
    async with AdminClient(address) as admin:
        await running(address, len(tasks))
        reports = await admin.requests()
        assert len(reports) == len(tasks)
        ages = [report.age_seconds for report in reports]
        assert ages == sorted(ages, reverse=True)
        for report in reports:
            assert (await admin.request(report.request_id)).request_id == report.request_id
            await admin.abort(report.request_id, "enough")
        with pytest.raises(NotFoundError, match="no request that runs"):
            await admin.abort("none-such")
        with pytest.raises(InvalidRequestError, match="request_id is empty"):
            await admin.request("")
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, AbortedError)
        assert "enough" in str(result)


async def test_a_killed_worker_is_started_again_as_it_was_and_a_drain_ends_all(
    services: tuple[str, str],
) -> None:
    with coordinator(*services, "--workers", "2") as process:
        address = address_of(process)
        expected = await complete(address, TOKENS)
        async with AdminClient(address) as admin:
            await admin.update_config({"num_speculative_tokens": "3"})
            await admin.drain(services[1])
            counted = (await admin.stats()).completion_tokens
        before = workers_of(process)
        tasks = [asyncio.create_task(complete(address, TOKENS, goes_on=False)) for _ in range(STREAMS)]
        others = [asyncio.create_task(complete(address, TOKENS)) for _ in range(4)]
        await running(address, len(tasks) + len(others))
        os.kill(before[0], signal.SIGKILL)
        assert await asyncio.gather(*others) == [expected] * len(others), "clients go on by themselves"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [result for result in results if isinstance(result, BaseException)]
        assert broken, "some streams were on the killed worker"
        assert all(isinstance(error, ServiceUnavailableError) for error in broken), broken
        whole = [result for result in results if not isinstance(result, BaseException)]
        assert whole, "some streams were on the other worker"
        assert all(result == expected for result in whole)
        assert await complete(address, TOKENS) == expected
        await until(lambda: len(set(workers_of(process)) - {before[0]}) == 2, SECONDS)
        assert before[1] in workers_of(process)
        async with AdminClient(address) as admin:
            assert "worker ended; it is started again" in process.stderr
            assert (await admin.stats()).completion_tokens >= counted + TOKENS * len(whole)
            replicas = {replica.address: replica for replica in await admin.replicas()}
            assert replicas[services[1]].state is ReplicaState.DRAINING
            option = next(each for each in await admin.config() if each.name == "num_speculative_tokens")
            assert option.value == 3
        tasks = [asyncio.create_task(complete(address, TOKENS)) for _ in range(4)]
        await running(address, len(tasks))
        process.signal(signal.SIGTERM)
        assert all(len(tokens) == TOKENS for _, tokens in await asyncio.gather(*tasks)), (
            "a drain lets them end"
        )
        assert await asyncio.to_thread(process.wait, SECONDS) == 0
        assert not workers_of(process)


def test_a_taken_port_is_refused(two: Process, services: tuple[str, str]) -> None:
    port = address_of(two).rpartition(":")[2]
    with coordinator(*services, "--workers", "2", "--port", port) as process:
        assert process.wait(SECONDS) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in process.stderr


async def test_an_end_of_the_parent_ends_the_workers(two: Process) -> None:
    """The last test: nothing answers after it."""
    pids = workers_of(two)
    assert len(pids) == 2
    two.signal(signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)), SECONDS)


async def running(address: str, count: int) -> None:
    """Wait until so many requests have tokens: a client tries one that has none again by itself."""
    async with asyncio.timeout(SECONDS), AdminClient(address) as admin:
        while sum(each.completion_tokens > 0 for each in await admin.requests()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # it is another process

"""Two coordinators over the same drafts and targets: they hold no state, so a request may go to either, and move."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack

import pytest

from tandem.client import Client
from tandem.errors import ServiceUnavailableError
from tandem.types import GenerationRequest
from tests.end_to_end.disturbed import Stream, request, started
from tests.end_to_end.processes import Nursery, Process, Service, address_of, coordinator, metrics_of, total
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until

pytestmark = pytest.mark.slow

STREAMS = 16
MAX_TOKENS = 64
SECONDS = 60.0
METRICS = ("--prometheus-port", "0")


@pytest.fixture(scope="module")
def targets(services: Nursery) -> list[Service]:
    return started(services.model_service("target_service", DEMO_TARGET, *METRICS) for _ in range(2))


@pytest.fixture(scope="module")
def drafts(services: Nursery) -> list[Service]:
    return started(services.model_service("draft_service", DEMO_DRAFT, *METRICS) for _ in range(2))


@pytest.fixture
def coordinators(targets: list[Service], drafts: list[Service]) -> Iterator[list[Process]]:
    """Two of them, each with the addresses of all replicas."""
    names = [",".join(each.address for each in replicas) for replicas in (targets, drafts)]
    with ExitStack() as stack:
        yield [stack.enter_context(coordinator(*names, *METRICS)) for _ in range(2)]


@pytest.fixture(scope="module")
def requests(prompts: list[str]) -> list[GenerationRequest]:
    """Half at temperature 0, half under `strict` with a seed."""
    rules = ("greedy", "strict") * (STREAMS // 2)
    return [request(prompts[i // 2], rule, MAX_TOKENS) for i, rule in enumerate(rules)]


@pytest.fixture(scope="module")
def expected(
    targets: list[Service], drafts: list[Service], requests: list[GenerationRequest]
) -> list[list[int]]:
    """The tokens of each request through a single coordinator."""
    with coordinator(targets[0].address, drafts[0].address) as process:
        found = asyncio.run(through([address_of(process)], requests))
    return [stream.token_ids for stream in found]


async def through(addresses: Sequence[str], requests: Sequence[GenerationRequest]) -> list[Stream]:
    """Complete all requests at once, in turn by each of the coordinators."""
    streams = [Stream() for _ in requests]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(address)) for address in addresses]
        await asyncio.gather(
            *(
                stream.read(clients[i % len(clients)], wanted)
                for i, (stream, wanted) in enumerate(zip(streams, requests, strict=True))
            )
        )
    return streams


def metric(service: Process | Service, name: str) -> float:
    return total(metrics_of(service), name)


async def of_all(services: Sequence[Process | Service], name: str) -> float:
    return sum([await asyncio.to_thread(metric, service, name) for service in services])


async def test_streams_through_both_have_equal_tokens_and_each_counts_its_own(
    coordinators: list[Process],
    targets: list[Service],
    requests: list[GenerationRequest],
    expected: list[list[int]],
) -> None:
    addresses = [address_of(process) for process in coordinators]
    before = await of_all(targets, "tandem_engine_batch_tokens_sum")
    found = await through(addresses, requests)
    assert [stream.token_ids for stream in found] == expected
    assert all(any(stream.drafted) for stream in found)
    tokens = [sum(len(stream.token_ids) for stream in found[i::2]) for i in range(2)]
    for process, count in zip(coordinators, tokens, strict=True):
        assert await of_all([process], "tandem_requests_total") == STREAMS / 2
        assert await of_all([process], "tandem_generation_tokens_total") == count
        assert await of_all([process], "tandem_num_requests_running") == 0
    assert await of_all(targets, "tandem_engine_batch_tokens_sum") - before >= sum(tokens) / 2
    for target in targets:
        assert await of_all([target], "tandem_engine_batch_tokens_sum") > 0, "each target had a part"


async def test_a_client_goes_on_at_the_other_when_one_is_killed(
    coordinators: list[Process],
    targets: list[Service],
    drafts: list[Service],
    requests: list[GenerationRequest],
    expected: list[list[int]],
) -> None:
    """Killed once each of its streams has begun; what had come before is the beginning of what comes then."""
    clients = [Client(address_of(process)) for process in coordinators]
    begun = [asyncio.Event() for _ in requests]
    killed = asyncio.Event()
    interrupted: list[int] = []

    async def completed(number: int) -> list[int]:
        first, tokens = Stream(), Stream()
        try:
            await first.read(clients[number % 2], requests[number], begun[number])
        except ServiceUnavailableError:
            interrupted.append(number)
            await killed.wait()
            await tokens.read(clients[1], requests[number])
            assert tokens.token_ids[: len(first.token_ids)] == first.token_ids
            return tokens.token_ids
        return first.token_ids

    tasks = [asyncio.create_task(completed(number)) for number in range(STREAMS)]
    await asyncio.gather(*(event.wait() for event in begun))
    coordinators[0].signal(signal.SIGKILL)
    killed.set()
    assert [await task for task in tasks] == expected
    assert interrupted, "some of its streams were still running"
    assert all(number % 2 == 0 for number in interrupted), "those of the other coordinator noticed nothing"
    assert await of_all(coordinators[1:], "tandem_requests_total") == STREAMS / 2 + len(interrupted)
    for client in clients:
        await client.close()
    services = [*targets, *drafts]
    await until(
        lambda: all(metric(service, "tandem_num_sequences_running") == 0 for service in services),
        SECONDS,
        lambda: "sequences of the killed coordinator are still open",
    )

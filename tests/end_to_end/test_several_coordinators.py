"""Two coordinators over the same drafts and targets: they hold no state, so a request may go to either, and move."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from tandem.client import Client
from tandem.errors import ServiceUnavailableError
from tandem.types import GenerationRequest
from tests.end_to_end.disturbed import Stream, joining, request, started
from tests.end_to_end.processes import Nursery, Process, Service, address_of, metrics_of, total
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until

pytestmark = pytest.mark.slow

STREAMS = 16
MAX_TOKENS = 64
SECONDS = 60.0
METRICS = ("--prometheus-port", "0")


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


async def test_a_request_may_go_to_either_and_again_to_the_other_when_one_is_killed(
    services: Nursery, prompts: list[str]
) -> None:
    """Killed once each of its streams has begun; what had come before is the beginning of what comes then."""
    rules = ("greedy", "strict") * (STREAMS // 2)
    requests = [request(prompts[i // 2], rule, MAX_TOKENS) for i, rule in enumerate(rules)]
    targets, drafts = (
        started(services.model_service(package, model, *METRICS) for _ in range(2))
        for package, model in (("target_service", DEMO_TARGET), ("draft_service", DEMO_DRAFT))
    )
    with joining(targets, drafts, *METRICS) as first, joining(targets, drafts, *METRICS) as second:
        coordinators = [first, second]
        addresses = [address_of(process) for process in coordinators]
        found, swapped = [await through(each, requests) for each in (addresses, addresses[::-1])]
        expected = [stream.token_ids for stream in found]
        assert [stream.token_ids for stream in swapped] == expected
        assert all(any(stream.drafted) for stream in (*found, *swapped))
        for process in coordinators:
            assert await of_all([process], "tandem_requests_total") == STREAMS
            assert await of_all([process], "tandem_generation_tokens_total") == sum(map(len, expected))
            assert await of_all([process], "tandem_num_requests_running") == 0
        for target in targets:
            assert await of_all([target], "tandem_engine_batch_tokens_sum") > 0, "each target had a part"

        begun = [asyncio.Event() for _ in requests]
        killed = asyncio.Event()
        interrupted: list[int] = []

        async def completed(number: int) -> list[int]:
            begin, tokens = Stream(), Stream()
            try:
                await begin.read(clients[number % 2], requests[number], begun[number])
            except ServiceUnavailableError:
                interrupted.append(number)
                await killed.wait()
                await tokens.read(clients[1], requests[number])
                assert tokens.token_ids[: len(begin.token_ids)] == begin.token_ids
                return tokens.token_ids
            return begin.token_ids

        async with Client(addresses[0]) as one, Client(addresses[1]) as other:
            clients = [one, other]
            tasks = [asyncio.create_task(completed(number)) for number in range(STREAMS)]
            await asyncio.gather(*(event.wait() for event in begun))
            first.signal(signal.SIGKILL)
            killed.set()
            assert [await task for task in tasks] == expected
        assert interrupted, "some of its streams were still running"
        assert all(number % 2 == 0 for number in interrupted), (
            "those of the other coordinator noticed nothing"
        )
        assert await of_all([second], "tandem_requests_total") == STREAMS * 3 / 2 + len(interrupted)
        models = [*targets, *drafts]
        await until(
            lambda: all(metric(each, "tandem_num_sequences_running") == 0 for each in models),
            SECONDS,
            lambda: "sequences of the killed coordinator are still open",
        )

"""Two coordinators over the same drafts and targets: they hold no state, so a request may go to either, and move."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tandem.client import Client
from tandem.errors import ServiceUnavailableError
from tests.end_to_end.disturbed import Stream, joining, request, started, streamed
from tests.end_to_end.processes import Nursery, address_of, metrics_of, total
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import until

pytestmark = pytest.mark.slow

STREAMS = 16
MAX_TOKENS = 64
SECONDS = 60.0


async def test_a_request_may_go_to_either_and_again_to_the_other_when_one_is_killed(
    services: Nursery, prompts: list[str]
) -> None:
    """Killed once each of its streams has begun; what had come before is the beginning of what comes then."""
    rules = ("greedy", "strict") * (STREAMS // 2)
    requests = [request(prompts[i // 2], rule, MAX_TOKENS) for i, rule in enumerate(rules)]
    targets, drafts = (
        started(services.model_service(package, model, "--prometheus-port", "0") for _ in range(2))
        for package, model in (("target_service", DEMO_TARGET), ("draft_service", DEMO_DRAFT))
    )
    begun = [asyncio.Event() for _ in requests]
    killed = asyncio.Event()
    interrupted: list[int] = []

    async def completed(number: int) -> list[int]:
        begin = Stream()
        try:
            await begin.read(clients[number % 2], requests[number], begun[number])
        except ServiceUnavailableError:
            interrupted.append(number)
            await killed.wait()
            whole = await streamed(clients[1], requests[number])
            assert whole.token_ids[: len(begin.token_ids)] == begin.token_ids
            return whole.token_ids
        return begin.token_ids

    with joining(targets, drafts) as first, joining(targets, drafts) as second:
        async with Client(address_of(first)) as one, Client(address_of(second)) as other:
            clients = [one, other]
            # By the other coordinator than those that follow
            expected = await asyncio.gather(
                *(streamed(clients[(number + 1) % 2], each) for number, each in enumerate(requests))
            )
            assert all(any(stream.drafted) for stream in expected)
            for each in targets:
                assert total(metrics_of(each), "tandem_engine_batch_tokens_sum") > 0, "each target had a part"
            tasks = [asyncio.create_task(completed(number)) for number in range(STREAMS)]
            await asyncio.gather(*(event.wait() for event in begun))
            first.signal(signal.SIGKILL)
            killed.set()
            assert [await task for task in tasks] == [stream.token_ids for stream in expected]
        assert interrupted, "some of its streams were still running"
        assert all(number % 2 == 0 for number in interrupted), "those of the other noticed nothing"
        await until(
            lambda: (
                not any(
                    total(metrics_of(each), "tandem_num_sequences_running") for each in (*targets, *drafts)
                )
            ),
            SECONDS,
            lambda: "sequences of the killed coordinator are still open",
        )

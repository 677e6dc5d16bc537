"""Several coordinators over the same services, by one client that has both addresses: docs/scaling.md's example."""

from __future__ import annotations

import signal
from contextlib import aclosing

import pytest

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.model.types import GenerationRequest
from tests.end_to_end.processes import address_of, coordinator

REQUEST = GenerationRequest("def f(", max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
async def test_calls_go_to_each_coordinator_in_turn_and_pass_over_a_dead_one(
    target_address: str, draft_address: str
) -> None:
    with (
        coordinator(target_address, draft_address) as first,
        coordinator(target_address, draft_address) as second,
    ):
        addresses = [address_of(first), address_of(second)]
        async with Client(f"ipv4:{','.join(addresses)}") as client:
            texts = {(await complete(client)) for _ in range(8)}
            assert len(texts) == 1
            counts = [await served(address) for address in addresses]
            assert sum(counts) == 8
            assert min(counts) >= 3, counts
            second.signal(signal.SIGKILL)
            second.wait()
            texts |= {(await complete(client)) for _ in range(4)}
            assert len(texts) == 1
            assert await served(addresses[0]) == counts[0] + 4


async def complete(client: Client) -> str:
    pieces = [chunk.text async for chunk in client.generate(REQUEST)]
    return "".join(pieces)


async def served(address: str) -> int:
    """Completions that a coordinator counts, once none runs."""
    async with AdminClient(address) as admin, aclosing(admin.watch_stats(0.1)) as watch:
        async for stats in watch:
            if not stats.load.running:
                return stats.outcomes.completed
    raise AssertionError("the coordinator ended")

"""What every drafting method beside its target has to keep: a lost target, and the target's distribution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tandem.client import Client
from tandem.replica import Role
from tandem.types import GenerationRequest
from tests.end_to_end.chi_square import critical_value, statistic, visible_distance
from tests.service.bound_pair import host, over
from tests.service.clients import Completed, complete
from tests.service.test_ahead_distribution import PLACES, exact


def accepted(completed: Sequence[Completed]) -> int:
    """Number of tokens that the head proposed and that stayed."""
    return sum(sum(each.drafted) for each in completed)


async def with_a_lost_target(
    target: Path, head: Path | None, requests: Sequence[GenerationRequest]
) -> tuple[list[Completed], int]:
    """Run requests over two targets with heads, one of which dies when the first token is there.

    Returns:
        The texts, and how many proposed tokens were accepted beside the target that stayed.
    """
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(host(target, head)) for _ in range(2)]
        address, service = await stack.enter_async_context(over(first, second))
        async with Client(address) as client:
            begun = asyncio.Event()
            running = [asyncio.create_task(complete(client, request, begun)) for request in requests]
            await begun.wait()
            await first.server.stop(None)
            completed = await asyncio.gather(*running)
            drafts = {each.address: each for each in service.replicas.snapshots() if each.role is Role.DRAFT}
            return completed, drafts[second.address].figures.accepted


def check_distribution(model: Any, rule: GenerationRequest, completed: Sequence[Completed]) -> None:
    """Chi-square over tokens of rounds with proposals; a correct implementation fails with a probability of 1 in
    10 000, decided once where the seeds are fixed.

    Args:
        model: the target, as transformers runs it.
        rule: one of the requests, which differ in their seeds alone.
        completed: their texts.
    """
    drafted = sum(each.stats.drafted for each in completed)
    share = accepted(completed) / drafted
    assert 0.1 < share < 0.9, (
        f"the test needs both accepted and recovered tokens, and {share:.0%} were accepted"
    )
    counts = Counter(each.token_ids[PLACES] for each in completed)
    expected = exact(model, rule)
    assert set(counts) <= set(expected)
    value, freedom = statistic(counts, expected)
    assert value < critical_value(freedom)
    assert visible_distance(len(completed), freedom) < 0.45

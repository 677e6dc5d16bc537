"""Targets with a drafting head beside them, in this process, and coordinators over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from bound_service.loading import BoundPair, load_pair
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.servicer import DraftServicer
from tandem.types import GenerationRequest
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings
from tests.end_to_end.chi_square import critical_value, statistic, visible_distance
from tests.end_to_end.models import random_model
from tests.service.clients import Completed
from tests.service.fakes import coordinator, serving
from tests.service.test_drafting_ahead import PLACES, exact


def small_target() -> Any:
    """A model of six tokens, so that a head of random weights is right now and then."""
    return random_model(
        10,
        vocab_size=6,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )


@dataclass(frozen=True)
class Host:
    """Both services on one port."""

    address: str
    server: grpc.aio.Server
    pair: BoundPair


@asynccontextmanager
async def host(target: Path, head: Path | None, **settings: object) -> AsyncIterator[Host]:
    """A target with its head, ready; None for the prediction layers in the target's own checkpoint."""
    values: dict[str, Any] = {"model": target, "threads": 1, "max_length": 128, "compile": "off", **settings}
    pair = load_pair(TargetSettings(**values), head)
    targets, drafts = TargetServicer(), DraftServicer()
    targets.verifier, drafts.proposer = pair.verifier, pair.proposer
    async with AsyncExitStack() as stack:
        for engine in (pair.verifier, pair.proposer):
            await engine.start()
            stack.push_async_callback(engine.close)
        yield Host(*await stack.enter_async_context(serving(targets, drafts)), pair)


@asynccontextmanager
async def over(*hosts: Host, **settings: object) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """A coordinator that knows the targets' addresses alone."""
    values: dict[str, Any] = {
        "target_address": ",".join(each.address for each in hosts),
        "draft_patience_seconds": 30.0,
        "speculation_policy": "fixed",
        **settings,
    }
    async with coordinator(CoordinatorSettings(**values)) as served:
        yield served


def accepted(completed: Sequence[Completed]) -> int:
    """Number of tokens that the head proposed and that stayed."""
    return sum(sum(each.drafted) for each in completed)


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

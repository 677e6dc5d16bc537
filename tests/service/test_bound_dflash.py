"""A DFlash draft beside its target: no text changes by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.client import Client
from tandem.errors import TandemError
from tandem.types import GenerationRequest
from tests.dflash_models import save_dflash
from tests.end_to_end.models import save_model
from tests.service.bound_checks import accepted, check_distribution, with_a_lost_target
from tests.service.bound_pair import host, over, small_target
from tests.service.clients import Completed, complete, complete_all
from tests.service.test_bound_draft import GREEDY, PROMPTS, SECONDS, STRICT, by_transformers


@pytest.fixture(scope="module")
def model() -> Any:
    return small_target()


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("pair")
    (made / "target").mkdir()
    return save_model(model, made / "target"), save_dflash(made / "head", model)


def completed(folders: tuple[Path, Path], *batches: Sequence[GenerationRequest]) -> list[list[Completed]]:
    """Complete one batch after the other, each at once."""

    async def run() -> list[list[Completed]]:
        async with asyncio.timeout(SECONDS), host(*folders) as pair, over(pair) as (address, _):
            return [await complete_all(address, batch) for batch in batches]

    return asyncio.run(run())


def test_greedy_text_is_that_of_transformers(model: Any, folders: tuple[Path, Path]) -> None:
    """One request, then sixteen at once, then the same prompts again, whose pages are reused."""
    requests = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]
    first, second, third = completed(folders, requests[:1], requests, requests)
    expected = [by_transformers(model, prompt) for prompt in PROMPTS]
    assert [each.token_ids for each in (*first, *second, *third)] == [expected[0], *expected, *expected]
    assert accepted(second) > len(requests), "the draft was right now and then"


def test_preempted_sequences_keep_their_text(model: Any, folders: tuple[Path, Path]) -> None:
    """There are pages for a few sequences of sixteen, which grow past their first page."""
    prompts = [(*prompt * 8,)[:56] for prompt in PROMPTS]
    # Pages of 64 tokens. For each, the models store 6 * 64 + 56 + 2 * 128 numbers of four bytes.
    room = 8 * 64 * 4 * (6 * 64 + 56 + 2 * 128)

    async def run() -> tuple[list[Completed], int]:
        small = host(*folders, kv_cache_memory_bytes=room)
        async with asyncio.timeout(SECONDS), small as pair, over(pair) as (address, _):
            found = await complete_all(address, [replace(GREEDY, prompt=prompt) for prompt in prompts])
            return found, pair.pair.verifier.kv_usage().preemption_count

    found, preemptions = asyncio.run(run())
    assert [each.token_ids for each in found] == [by_transformers(model, prompt) for prompt in prompts]
    assert preemptions > 0
    assert accepted(found) > 0


def test_seeded_text_does_not_depend_on_the_draft(folders: tuple[Path, Path]) -> None:
    """One request, then sixteen at once."""
    requests = [replace(STRICT, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    first, with_draft, without = completed(
        folders, requests[:1], requests, [replace(request, speculation=False) for request in requests]
    )
    assert [each.token_ids for each in with_draft] == [each.token_ids for each in without]
    assert first[0].token_ids == without[0].token_ids
    assert accepted(with_draft) > 0
    assert accepted(without) == 0


def test_residual_sampling_keeps_the_targets_distribution(model: Any, folders: tuple[Path, Path]) -> None:
    """The tokens of a block are drawn independently of each other."""
    rule = replace(
        STRICT,
        rejection_sampling_strategy="residual",
        temperature=3.0,
        top_k=3,
        max_tokens=6,
        num_speculative_tokens=2,
    )
    requests = [replace(rule, seed=seed) for seed in range(160)]
    [found] = completed(folders, requests)
    check_distribution(model, rule, found)


def test_a_lost_target_takes_its_draft_along_and_the_text_stays(
    model: Any, folders: tuple[Path, Path]
) -> None:
    """Sixteen requests over two targets with drafts, one of which dies; each goes on with the other target and its
    draft."""
    requests = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]

    async def run() -> tuple[list[Completed], int]:
        async with asyncio.timeout(SECONDS):
            return await with_a_lost_target(*folders, requests)

    found, accepted_elsewhere = asyncio.run(run())
    assert [each.token_ids for each in found] == [by_transformers(model, prompt) for prompt in PROMPTS]
    assert accepted_elsewhere > 0


def test_penalties_are_refused(folders: tuple[Path, Path]) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(SECONDS),
            host(*folders) as pair,
            over(pair) as (address, _),
            Client(address) as client,
        ):
            with pytest.raises(TandemError, match="with a separate draft model it must be 0"):
                await complete(client, replace(GREEDY, frequency_penalty=1.0))

    asyncio.run(run())

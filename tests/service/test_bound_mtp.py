"""A target that drafts with its own prediction layer: no text changes by it, and penalties are allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.admin_client import AdminClient
from tandem.client import Client
from tandem.types import GenerationRequest
from tests.mtp_models import mtp_target, save_mtp
from tests.qwen_mtp_models import FAMILIES, qwen_target, save_qwen_mtp
from tests.service.bound_checks import accepted, check_distribution, with_a_lost_target
from tests.service.bound_pair import host, over
from tests.service.clients import Completed, complete, complete_all
from tests.service.test_bound_draft import GREEDY, PROMPTS, SECONDS, STRICT, by_transformers


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of six tokens, so that a layer of random weights is right now and then."""
    return mtp_target("deepseek_v3", vocabulary=6)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(model, tmp_path_factory.mktemp("mtp"))


def completed(folder: Path, *batches: Sequence[GenerationRequest]) -> list[list[Completed]]:
    """Complete one batch after the other, each at once."""

    async def run() -> list[list[Completed]]:
        async with asyncio.timeout(SECONDS), host(folder, None) as pair, over(pair) as (address, _):
            return [await complete_all(address, batch) for batch in batches]

    return asyncio.run(run())


def test_greedy_text_is_that_of_transformers(model: Any, folder: Path) -> None:
    """One request, then sixteen at once, then the same prompts again, whose pages are reused."""
    requests = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]
    first, second, third = completed(folder, requests[:1], requests, requests)
    expected = [by_transformers(model, prompt) for prompt in PROMPTS]
    assert [each.token_ids for each in (*first, *second, *third)] == [expected[0], *expected, *expected]
    assert accepted(second) > len(requests), "the layer was right now and then"


def test_preempted_sequences_keep_their_text(model: Any, folder: Path) -> None:
    """There are pages for a few sequences of sixteen, which grow past their first page."""
    prompts = [(*prompt * 8,)[:56] for prompt in PROMPTS]
    # Pages of 64 tokens. For each, the models store 3 * 72 + 40 + 72 numbers of four bytes.
    room = 8 * 64 * 4 * (3 * 72 + 40 + 72)

    async def run() -> tuple[list[Completed], int]:
        small = host(folder, None, kv_cache_memory_bytes=room)
        async with asyncio.timeout(SECONDS), small as pair, over(pair) as (address, _):
            found = await complete_all(address, [replace(GREEDY, prompt=prompt) for prompt in prompts])
            return found, pair.pair.verifier.kv_usage().preemption_count

    found, preemptions = asyncio.run(run())
    assert [each.token_ids for each in found] == [by_transformers(model, prompt) for prompt in prompts]
    assert preemptions > 0
    assert sum(each.stats.drafted for each in found) > 0


def test_seeded_text_does_not_depend_on_the_layer(folder: Path) -> None:
    """One request, then sixteen at once."""
    requests = [replace(STRICT, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    first, with_layer, without = completed(
        folder, requests[:1], requests, [replace(request, speculation=False) for request in requests]
    )
    assert [each.token_ids for each in with_layer] == [each.token_ids for each in without]
    assert first[0].token_ids == without[0].token_ids
    assert accepted(with_layer) > 0
    assert accepted(without) == 0


def test_penalized_text_does_not_depend_on_the_layer(folder: Path) -> None:
    plain = [*(replace(STRICT, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS[:4])), GREEDY]
    penalized = [replace(each, frequency_penalty=1.0, presence_penalty=0.5) for each in plain]
    unpenalized, with_layer, without = completed(
        folder, plain[:1], penalized, [replace(request, speculation=False) for request in penalized]
    )
    assert [each.token_ids for each in with_layer] == [each.token_ids for each in without]
    assert accepted(with_layer) > 0, "penalties leave the layer at work"
    assert with_layer[0].token_ids != unpenalized[0].token_ids, "and they count"


def test_a_lost_target_takes_its_layer_along_and_the_text_stays(model: Any, folder: Path) -> None:
    """Sixteen requests over two targets that draft by themselves, one of which dies; each goes on with the other."""
    requests = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]

    async def run() -> tuple[list[Completed], int]:
        async with asyncio.timeout(SECONDS):
            return await with_a_lost_target(folder, None, requests)

    found, accepted_elsewhere = asyncio.run(run())
    assert [each.token_ids for each in found] == [by_transformers(model, prompt) for prompt in PROMPTS]
    assert accepted_elsewhere > 0


def test_residual_sampling_keeps_the_targets_distribution(model: Any, folder: Path) -> None:
    rule = replace(
        STRICT,
        rejection_sampling_strategy="residual",
        temperature=3.0,
        top_k=3,
        max_tokens=6,
        num_speculative_tokens=2,
    )
    [found] = completed(folder, [replace(rule, seed=seed) for seed in range(160)])
    check_distribution(model, rule, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_qwens_layout_keeps_greedy_and_seeded_text(family: str, tmp_path: Path) -> None:
    model = qwen_target(family, vocabulary=6)
    saved = save_qwen_mtp(model, tmp_path / "target")
    greedy = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]
    strict = [replace(STRICT, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    without = [replace(each, speculation=False) for each in strict]
    first, texts, alone, seeded, plain = completed(saved, greedy[:1], greedy, strict[:1], strict, without)
    expected = [by_transformers(model, prompt) for prompt in PROMPTS]
    assert [each.token_ids for each in (*first, *texts)] == [expected[0], *expected]
    assert [each.token_ids for each in seeded] == [each.token_ids for each in plain]
    assert alone[0].token_ids == plain[0].token_ids
    assert accepted(texts) > 0
    assert accepted(seeded) > 0


def test_unset_acceptance_is_typical(folder: Path) -> None:
    async def run() -> str:
        async with asyncio.timeout(SECONDS), host(folder, None) as pair, over(pair) as (address, _):
            async with Client(address) as client:
                await complete(client, replace(GREEDY, temperature=1.0, seed=1))
            async with AdminClient(address) as admin:
                return ", ".join((await admin.stats()).by_rule)

    assert asyncio.run(run()) == "typical-acceptance"

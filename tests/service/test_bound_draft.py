"""A draft that reads the target's hidden states: the coordinator finds it, keeps it with its target, and changes no
text by it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.admin_client import AdminClient
from tandem.client import Client
from tandem.errors import TandemError
from tandem.replica import Role
from tandem.types import GenerationRequest
from tests.service.bound_checks import accepted, check_distribution, with_a_lost_target
from tests.service.bound_pair import METHODS, host, over, saved_pair, small_target
from tests.service.clients import Completed, complete, complete_all

SECONDS = 120.0
TOKENS = 24
GREEDY = GenerationRequest(
    (3, 4), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=4, ignore_eos=True
)
STRICT = replace(GREEDY, temperature=1.0, seed=5, rejection_sampling_strategy="strict")
PROMPTS = [(1, 2, 3, 4, 5, index % 6, index // 6 % 6) * (index % 3 + 1) for index in range(16)]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_target()


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folders(model: Any, method: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return saved_pair(tmp_path_factory.mktemp("pair"), model, method)


@cache
def by_transformers(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Greedy text by transformers' own loop; every method must give it."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(int(each) for each in output[0, len(prompt) :])


def test_greedy_text_is_that_of_transformers(model: Any, folders: tuple[Path, Path]) -> None:
    """One request, then sixteen at once, then the same prompts again, whose pages are reused."""
    requests = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]

    async def run() -> list[Completed]:
        async with asyncio.timeout(SECONDS), host(*folders) as pair, over(pair) as (address, _):
            first = await complete_all(address, requests[:1])
            return [*first, *await complete_all(address, requests), *await complete_all(address, requests)]

    completed = asyncio.run(run())
    expected = [by_transformers(model, prompt) for prompt in PROMPTS]
    assert [each.token_ids for each in completed] == [expected[0], *expected, *expected]
    assert accepted(completed) > len(completed), "the head was right now and then"


def test_preempted_sequences_keep_their_text(model: Any, folders: tuple[Path, Path]) -> None:
    """The target and the head have pages for a few sequences of sixteen, which grow past their first page."""
    prompts = [(*prompt * 8,)[:56] for prompt in PROMPTS]
    # Pages of 64 tokens. For each, the models store 6 * 2 * 24 + 48 + 2 * 16 numbers of four bytes.
    bytes_of_a_page = 64 * 4 * 368

    async def run() -> tuple[list[Completed], int]:
        small = host(*folders, kv_cache_memory_bytes=8 * bytes_of_a_page)
        async with asyncio.timeout(SECONDS), small as pair, over(pair) as (address, _):
            completed = await complete_all(address, [replace(GREEDY, prompt=prompt) for prompt in prompts])
            return completed, pair.pair.verifier.kv_usage().preemption_count

    completed, preemptions = asyncio.run(run())
    assert [each.token_ids for each in completed] == [by_transformers(model, prompt) for prompt in prompts]
    assert preemptions > 0
    assert accepted(completed) > 0


def test_seeded_text_does_not_depend_on_the_head(folders: tuple[Path, Path]) -> None:
    """One request, then sixteen at once."""
    requests = [replace(STRICT, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    alone = [replace(request, speculation=False) for request in requests]

    async def run() -> tuple[list[Completed], list[Completed]]:
        async with asyncio.timeout(SECONDS), host(*folders) as pair, over(pair) as (address, _):
            first = await complete_all(address, requests[:1])
            with_head = [*first, *await complete_all(address, requests)]
            return with_head, await complete_all(address, [alone[0], *alone])

    with_head, without = asyncio.run(run())
    assert [each.token_ids for each in with_head] == [each.token_ids for each in without]
    assert accepted(with_head) > len(requests)
    assert accepted(without) == 0


def test_the_coordinator_finds_the_head_at_the_targets_address(
    method: str, folders: tuple[Path, Path]
) -> None:
    async def run() -> None:
        async with asyncio.timeout(SECONDS), host(*folders) as pair, over(pair) as (_, service):
            by_role = {each.role: each for each in service.replicas.snapshots()}
            draft = by_role[Role.DRAFT]
            assert draft.address == by_role[Role.TARGET].address == pair.address
            assert draft.model is not None
            assert draft.model.drafting_method == method

    asyncio.run(run())


def test_unset_acceptance_is_maxs_and_penalties_are_refused(method: str, folders: tuple[Path, Path]) -> None:
    async def run() -> str:
        async with asyncio.timeout(SECONDS), host(*folders) as pair, over(pair) as (address, _):
            async with Client(address) as client:
                await complete(client, replace(GREEDY, temperature=1.0, seed=1))
                with pytest.raises(TandemError, match="with a separate draft model it must be 0"):
                    await complete(client, replace(GREEDY, frequency_penalty=1.0))
            async with AdminClient(address) as admin:
                return ", ".join((await admin.stats()).by_rule)

    # MAX has no Medusa, and vLLM's rule for it is lossless.
    assert asyncio.run(run()) == ("residual" if method == "medusa" else "typical-acceptance")


def test_a_lost_target_takes_its_head_along_and_the_text_stays(
    model: Any, folders: tuple[Path, Path]
) -> None:
    """Sixteen requests over two targets with heads, one of which dies; each goes on with the other target and its
    head."""
    requests = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]

    async def run() -> tuple[list[Completed], int]:
        async with asyncio.timeout(SECONDS):
            return await with_a_lost_target(*folders, requests)

    completed, accepted_elsewhere = asyncio.run(run())
    assert [each.token_ids for each in completed] == [by_transformers(model, prompt) for prompt in PROMPTS]
    assert accepted_elsewhere > 0


def test_residual_sampling_keeps_the_targets_distribution(model: Any, folders: tuple[Path, Path]) -> None:
    rule = replace(
        STRICT, rejection_sampling_strategy="residual", top_k=3, max_tokens=6, num_speculative_tokens=2
    )
    requests = [replace(rule, seed=seed) for seed in range(160)]

    async def run() -> list[Completed]:
        async with asyncio.timeout(SECONDS), host(*folders) as pair, over(pair) as (address, _):
            return await complete_all(address, requests)

    check_distribution(model, rule, asyncio.run(run()))

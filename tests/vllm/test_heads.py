"""vLLM's own drafting heads in the steps of a target: they propose what independent references do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.model.types import GenerationRequest, SamplingParams
from tandem.model_sources.bundled import demo_pair
from tests import heads
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import exact, load_reference, save_model, six_tokens
from tests.end_to_end.processes import TANDEM, address_of, coordinator
from tests.end_to_end.processes import running as process_of
from tests.end_to_end.test_campaign import request as requested
from tests.heads import Eagle3Reference, MedusaReference, save_dflash, save_eagle, save_eagle3
from tests.mtp_models import MtpTarget
from tests.paths import DEMO_EAGLE3, DEMO_TARGET, DEVICE
from tests.service.clients import complete_all
from tests.unit.engine.greedy import most_probable
from tests.unit.target_service.test_head_drafter import (
    Reference,
    Request,
    running,
    saved_target,
    small_target,
)
from tests.vllm.test_serving import SCHEMA

pytestmark = pytest.mark.timeout(600)

OPTIONS: dict[str, Any] = {
    "engine": "vllm",
    "device": DEVICE,
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "num_speculative_tokens": 4,
}
SERVED = (
    *("--engine", "vllm", "--enforce-eager", "--dtype", "float32", "--threads", "1", "--port", "0"),
    *("--num-speculative-tokens", "4"),
)
TEXTS = ("def add(a, b):\n", "class Stack:\n", "import os\n\n", "for each in range(10):\n")
PROMPTS = [tuple(300 + (7 * row + column) % 900 for column in range(4 + 17 * row)) for row in range(5)]
HEADS: dict[str, tuple[Path, Callable[[Path, Any], Reference]]] = {
    "eagle3": (DEMO_EAGLE3, Eagle3Reference),
    "medusa": (demo_pair().head("medusa"), MedusaReference),
}


@pytest.fixture(scope="module", autouse=True)
def wide_heads() -> Iterator[None]:
    """Random heads as wide as vLLM's kernels for CPUs want them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "HEAD_DIM", 32)
        yield


def assert_proposals_are_of(reference: Reference, requests: Sequence[Request]) -> None:
    """But for tokens that are as probable as another, and where nobody knew yet what a round came to."""
    lengths = [(request, *proposed) for request in requests for proposed in request.proposals[1:]]
    proposed = [(request, length, proposal) for request, length, proposal in lengths if proposal]
    assert len(proposed) > 0.75 * len(lengths)
    differing = [
        length
        for request, length, proposal in proposed
        if list(proposal) != reference.propose(request.tokens[:length], 4)
    ]
    assert len(differing) <= 0.03 * len(proposed)


@pytest.mark.parametrize("method", HEADS)
async def test_proposals_are_the_references_and_texts_the_targets(method: str) -> None:
    model = load_reference(DEMO_TARGET)
    head, make_reference = HEADS[method]
    reference = make_reference(head, model)
    async with running(DEMO_TARGET, head, **OPTIONS) as verifier:
        requests = [Request(verifier, str(index), prompt) for index, prompt in enumerate(PROMPTS)]
        texts = await asyncio.gather(*(request.run(40) for request in requests))
    assert_proposals_are_of(reference, requests)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == most_probable(model, prompt, text)


async def test_a_head_draws_with_the_noise_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target draws is what the head drew, oftener than it is the head's most probable token; the texts are
    the same."""

    async def run() -> tuple[list[list[int]], int]:
        async with running(DEMO_TARGET, DEMO_EAGLE3, **OPTIONS) as verifier:
            requests = [
                Request(verifier, str(seed), prompt, sampling=SamplingParams(temperature=1.0, seed=seed))
                for seed, prompt in enumerate(PROMPTS)
            ]
            texts = await asyncio.gather(*(request.run(60) for request in requests))
        return texts, sum(request.accepted for request in requests)

    texts, accepted = await run()
    monkeypatch.setattr("tandem.engine_vllm.heads.noise_of", lambda job, length: None)
    texts_without, accepted_without = await run()
    assert texts == texts_without
    assert accepted > 1.15 * accepted_without > 0


@pytest.fixture(scope="module", params=HEADS)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """The demo target with a head."""
    head, _ = HEADS[request.param]
    words = ("--model", str(DEMO_TARGET), "--draft-model", str(head))
    with process_of(TANDEM, "serve", "target", *words, *SERVED) as process:
        yield address_of(process)


@pytest.mark.parametrize("lead", [0, 1, 4])
async def test_heads_change_no_text(address: str, lead: int) -> None:
    """Led rounds and others, alone and together."""
    asked = [requested(prompt, rule, 48) for rule in ("greedy", "strict") for prompt in TEXTS]
    with coordinator(address, None, "--target-lead", str(lead)) as process:
        expected = await complete_all(
            address_of(process), [replace(each, speculation=False) for each in asked], 4
        )
        for at_once in (1, 4):
            found = await complete_all(address_of(process), asked, at_once)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected], at_once
            drafted = sum(each.speculation.drafted for each in found)
            accepted = sum(each.speculation.accepted for each in found)
            led = sum(each.speculation.lead.rounds for each in found)
            rounds = sum(each.speculation.rounds for each in found)
            assert accepted > 0.1 * drafted > 0
            assert (led > 0.5 * rounds) == (lead > 0)


async def test_a_grammar_bounds_what_a_head_proposes(address: str) -> None:
    asked = [
        replace(requested(prompt, rule, 200), grammar=SCHEMA, ignore_eos=False)
        for prompt in TEXTS
        for rule in ("greedy", "strict")
    ]
    with coordinator(address, None, "--target-lead", "4") as process:
        found = await complete_all(address_of(process), asked)
        expected = await complete_all(
            address_of(process), [replace(each, speculation=False) for each in asked]
        )
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for each in found:
        assert re.fullmatch(r'\{"name": "[a-z]{20,40}", "age": [0-9]{1,2}\}', each.text)
    assert any(each.speculation.accepted for each in found)


def three_layers() -> Any:
    return six_tokens(7, 3, 64, 0.1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator over a target whose distributions can be enumerated. Its head knows four tokens of six."""
    model = three_layers()
    folder = save_model(model, tmp_path_factory.mktemp("target"))
    head = save_eagle3(
        tmp_path_factory.mktemp("head"), model, draft_vocabulary=4, layer_ids=(0, 1, 2), seed=15
    )
    words = ("--model", str(folder), "--draft-model", str(head))
    with (
        process_of(TANDEM, "serve", "target", *words, *SERVED) as target,
        coordinator(address_of(target), None, "--target-lead", "4") as process,
    ):
        yield address_of(process)


@pytest.mark.parametrize("rule", ["strict", "residual", "block"])
async def test_every_lossless_rule_has_the_targets_distribution(small: str, rule: str) -> None:
    """1,200 texts of three tokens that are compared, as for separate drafts."""
    request = GenerationRequest((3, 4), temperature=1.0, top_k=4, rejection_sampling_strategy=rule)
    requests = [
        replace(request, max_tokens=5, num_speculative_tokens=3, ignore_eos=True, seed=seed)
        for seed in range(1200)
    ]
    compared = slice(0, 3)
    completed = await complete_all(small, requests)
    assert sum(each.speculation.accepted for each in completed) > 100
    assert sum(each.speculation.lead.rounds for each in completed) > 1000
    assert_drawn_from(exact(three_layers(), request, compared.stop), completed, compared, 0.15)


async def test_a_head_over_two_processes(tmp_path: Path) -> None:
    """Texts, and what is accepted of the head's proposals, are those over one."""
    found = []
    for count in ("1", "2"):
        words = (
            "--model",
            str(DEMO_TARGET),
            "--draft-model",
            str(DEMO_EAGLE3),
            "--tensor-parallel-size",
            count,
        )
        with (
            process_of(TANDEM, "serve", "target", *words, *SERVED) as target,
            coordinator(address_of(target), None, "--target-lead", "4") as process,
        ):
            asked = [requested(prompt, rule, 32) for rule in ("greedy", "strict") for prompt in TEXTS]
            found.append(await complete_all(address_of(process), asked, 2))
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[1]]
    accepted = [sum(each.speculation.accepted for each in each) for each in found]
    assert accepted[0] > 20
    assert abs(accepted[0] - accepted[1]) < 0.1 * accepted[0]
    assert all(each.speculation.lead.rounds for each in found[1])


MTP = {"qwen3_next": {"head_dim": 32}}


@pytest.mark.parametrize("family", MTP)
async def test_the_targets_own_layers_propose(family: str, tmp_path: Path) -> None:
    target = MtpTarget(family, size=64, **MTP[family])
    folder = target.save(tmp_path / "target")
    async with running(folder, None, **OPTIONS) as verifier:
        requests = [Request(verifier, str(index), prompt) for index, prompt in enumerate(PROMPTS)]
        texts = await asyncio.gather(*(request.run(24) for request in requests))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == most_probable(target.model, prompt, text)
    assert_proposals_are_of(target, requests)


RANDOM: dict[str, Callable[..., Path]] = {"eagle": partial(save_eagle, form="vllm"), "dflash": save_dflash}


@pytest.mark.parametrize("method", RANDOM)
async def test_random_heads_change_no_text(method: str, tmp_path: Path) -> None:
    """What they propose is vLLM's, which reads their files in its own way."""
    model = small_target(hidden_size=64)
    folder = saved_target(model, tmp_path / "target")
    head = RANDOM[method](tmp_path / "head", model)
    async with running(folder, head, **OPTIONS) as verifier:
        requests = [Request(verifier, str(index), prompt) for index, prompt in enumerate(PROMPTS)]
        texts = await asyncio.gather(*(request.run(24) for request in requests))
    for prompt, text, request in zip(PROMPTS, texts, requests, strict=True):
        assert text == most_probable(model, prompt, text)
        assert any(proposal for _, proposal in request.proposals)

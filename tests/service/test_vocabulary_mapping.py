"""Drafts with other tokenizers than the target's change its speed, never its text or its distribution."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.clients.admin_client import AdminClient
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.model.types import GenerationRequest
from tandem_draft.servicer import DraftServicer
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import blurred, exact, save_model
from tests.paths import DEMO_TARGET, DEVICE
from tests.service.clients import complete_all, until
from tests.service.engines import draft, services
from tests.service.fakes import coordinated
from tests.service.other_tokenizer import renumbered
from tests.service.test_drafting_ahead import small_target
from vllm_stub import Request, Runner, plugged, run

PROMPTS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for",
    "Once upon a time there was a little girl who",
    "I love this 👩🏽 and 🎉🎉, said",
    "今天天气很好。我们去",
    '{"name": "Ada", "tags": ["math", "engine"], "address": {"city":',
)


def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, device=DEVICE, dtype="float32", threads=1)


@pytest.fixture(scope="module")
def target_model() -> LoadedModel:
    return loaded(DEMO_TARGET)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft with 1200 of its 2048 tokens, under other ids: it has to spell many words."""
    return renumbered(tmp_path_factory.mktemp("draft"), 1200)


@asynccontextmanager
async def joined(
    target_model: LoadedModel, draft_folder: Path, servicer: DraftServicer | None = None, **options: Any
) -> AsyncIterator[str]:
    """The address of a coordinator over this pair; without `draft_ahead` each proposal is asked for."""
    # Long enough for the draft to draft ahead meanwhile.
    seconds = 0.04 if "draft_ahead" in options else 0.0
    drafting: dict[str, Any] = {"servicer": servicer, "tokenizer": draft_folder / "tokenizer.json"}
    usual: dict[str, Any] = {"draft_patience_seconds": 60.0, "draft_ahead": "off"}
    async with (
        asyncio.timeout(300.0),
        services(target_model, loaded(draft_folder), step_seconds=seconds, **drafting) as addresses,
        coordinated(*addresses, **(usual | options)) as (client, _),
    ):
        yield client.address


GREEDY = GenerationRequest("", max_tokens=16, temperature=0.0, num_speculative_tokens=4, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=7, rejection_sampling_strategy="strict")


@pytest.mark.parametrize("mapping", ["tli", "slem"])
async def test_texts_are_those_of_the_target_alone(
    target_model: LoadedModel, draft_folder: Path, mapping: str
) -> None:
    requests = [replace(each, prompt=prompt) for each in (GREEDY, SAMPLED) for prompt in PROMPTS]
    async with joined(target_model, draft_folder, vocabulary_mapping=mapping, draft_ahead=8) as address:
        alone = await complete_all(address, [replace(each, speculation=False) for each in requests])
        while True:  # on a busy machine all that was drafted ahead may come too late
            drafted = await complete_all(address, requests)
            assert [each.token_ids for each in drafted] == [each.token_ids for each in alone]
            parts = drafted[:5], drafted[5:]
            hits = [sum(each.speculation.ahead.hits for each in part) for part in parts]
            if hits[0] > 0 and (hits[1] > 0 or mapping == "slem"):
                break
        async with AdminClient(address) as admin:
            (coverage,) = [each.coverage for each in await admin.replicas() if each.coverage is not None]
    assert 0.25 < coverage.text_share <= 1.0
    assert coverage.build_seconds > 0.0
    accepted = [sum(each.speculation.accepted for each in part) for part in parts]
    assert min(accepted) > 12, "the draft is of use at temperature 0 and above"
    # A text that is drafted freely knows nothing of the target's noise, so nothing of the outcomes above temperature 0.
    assert mapping != "slem" or hits[1] == 0


@pytest.mark.parametrize(
    ("rule", "mapping", "options"), [("residual", "tli", {"draft_ahead": 4}), ("block", "slem", {})]
)
async def test_texts_have_the_target_s_distribution(
    rule: str, mapping: str, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chi-square over all completions; their probabilities come from the target's own module."""
    reference = small_target()
    folder = save_model(reference, tmp_path_factory.mktemp("target"))
    # One of the target's six tokens is not the draft's.
    other = renumbered(tmp_path_factory.mktemp("draft"), 5, blurred(small_target(), seed=9, scale=0.2))
    request = replace(GREEDY, prompt=(3, 4), max_tokens=4, temperature=1.0, rejection_sampling_strategy=rule)
    expected = exact(reference, request, 4)
    async with joined(loaded(folder), other, vocabulary_mapping=mapping, **options) as address:
        texts = await complete_all(address, [replace(request, seed=seed) for seed in range(136)])
    assert (sum(each.speculation.ahead.hits for each in texts) > 0) is ("draft_ahead" in options)
    assert_drawn_from(expected, texts, slice(2, 4), 0.35)  # the tokens that come with proposals


async def test_vllm_gets_proposals_of_its_own_tokens(draft_folder: Path) -> None:
    """From a draft with another tokenizer, through the plug-in: what the draft would write, in vLLM's tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    tokens = tokenizer.encode(PROMPTS[0]).ids
    runner = Runner(lambda read: tokens[len(read)] if len(read) < len(tokens) else 0)
    async with (
        draft(loaded(draft_folder), tokenizer=draft_folder / "tokenizer.json") as (address, _),
        plugged(address) as proposer,
    ):
        runner.requests = [Request(tokens[:6])]
        await run(proposer, runner, len(tokens) - 7)
    assert runner.accepted > 0
    assert runner.requests[0].tokens[: len(tokens)] == tokens


async def test_a_draft_that_has_forgotten_the_target_is_told_again(
    target_model: LoadedModel, draft_folder: Path
) -> None:
    """Other targets have pushed its tokenizer out: the request goes on, and drafting comes back."""
    servicer = DraftServicer()
    request = replace(GREEDY, prompt=PROMPTS[0], max_tokens=32)
    async with joined(target_model, draft_folder, servicer) as address:
        (alone,) = await complete_all(address, [replace(request, speculation=False)])
        vocabularies = servicer.proposer.vocabularies
        assert vocabularies is not None
        vocabularies._known.clear()
        (forgotten,) = await complete_all(address, [request])
        await until(lambda: vocabularies.coverage(target_model.info.tokenizer_hash) is not None)
        again = forgotten
        async with asyncio.timeout(60.0):
            while not again.speculation.accepted:  # the coordinator has yet to see it
                (again,) = await complete_all(address, [request])
    assert forgotten.token_ids == again.token_ids == alone.token_ids

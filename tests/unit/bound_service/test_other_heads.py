"""EAGLE and Medusa heads propose what independent references do, and the target's greedy text does not change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.model_sources.bundled import demo_pair
from tests.eagle_heads import EagleReference, save_eagle
from tests.end_to_end.models import load_reference
from tests.medusa_heads import MedusaReference, save_medusa
from tests.paths import DEMO_TARGET
from tests.unit.bound_service.pairs import Reference, Request, check, running, saved_target, small_target

Save = Callable[[Path, Any], Path]

VARIANTS: dict[str, tuple[Save, Callable[[Path, Any], Reference]]] = {
    "eagle, raw": (save_eagle, EagleReference),
    "eagle, a copy of the embedding and a bias": (
        partial(save_eagle, embedding="copied", bias=True), EagleReference,
    ),
    "eagle, vLLM's format and an embedding of its own": (
        partial(save_eagle, form="vllm", embedding="own"), EagleReference,
    ),
    "eagle, the speculators format": (partial(save_eagle, form="speculators"), EagleReference),
    "eagle, the speculators format with a bias": (
        partial(save_eagle, form="speculators", bias=True, embedding="own"), EagleReference,
    ),
    "eagle, the speculators format with norms": (
        partial(save_eagle, form="speculators", norms=True), EagleReference,
    ),
    "medusa, vLLM's format": (save_medusa, MedusaReference),
    "medusa, published names": (partial(save_medusa, published=True, bias=True), MedusaReference),
    "medusa, two layers": (partial(save_medusa, published=True, layers=2), MedusaReference),
    "medusa, some tokens": (partial(save_medusa, draft_vocabulary=96, bias=True), MedusaReference),
    "medusa, rows of some tokens": (
        partial(save_medusa, draft_vocabulary=96, whole_outputs=True), MedusaReference,
    ),
    "medusa, one output layer": (partial(save_medusa, shared_output=True), MedusaReference),
}  # fmt: skip
PROMPTS = [(5, 9, 2, 700, 31, 8), (1, 1), (40, 41, 42, 43) * 20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its folder."""
    model = small_target()
    return model, saved_target(model, tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", VARIANTS)
def test_proposals_are_those_of_the_reference(name: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    save, reference = VARIANTS[name]
    head = save(tmp_path / "eagle-head", model)
    asyncio.run(check(model, folder, head, reference(head, model), PROMPTS, 8))


@pytest.mark.parametrize("compile_mode", ["off", "auto"])
@pytest.mark.parametrize("name", ["eagle, raw", "medusa, vLLM's format"])
def test_accepted_positions_read_the_targets_states(name: str, compile_mode: str, tmp_path: Path) -> None:
    """A model of six tokens accepts some proposals, wholly or in part."""
    model = small_target(vocab_size=6)
    save, reference = VARIANTS[name]
    head = save(tmp_path / "eagle-head", model)
    folder = saved_target(model, tmp_path / "target")
    prompts = [(1, 2, 3), (4, 5), (0, 0, 1, 5, 5)]
    accepted = asyncio.run(
        check(model, folder, head, reference(head, model), prompts, 24, compile=compile_mode)
    )
    assert accepted > 5


@pytest.mark.soak
@pytest.mark.parametrize("name", VARIANTS)
def test_many_prompts(name: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    save, reference = VARIANTS[name]
    head = save(tmp_path / "eagle-head", model)
    prompts = [
        tuple((7 * row + column * column) % 2048 for column in range(2 + 3 * row)) for row in range(20)
    ]
    asyncio.run(check(model, folder, head, reference(head, model), prompts, 64, max_sequences=20))


def test_the_bundled_medusa_heads_foresee_some_tokens() -> None:
    model = load_reference(DEMO_TARGET)
    head = demo_pair().head("medusa")
    prompts = [tuple(range(300, 320)), (40, 41, 42, 43) * 4]
    reference = MedusaReference(head, model)
    run = check(model, DEMO_TARGET, head, reference, prompts, 24, dtype="float32", compile="auto")
    assert asyncio.run(run) > 0


def test_a_proposal_has_a_token_of_each_medusa_head_at_most(
    target: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = target
    head = save_medusa(tmp_path / "head", model)

    async def run() -> list[int]:
        async with running(folder, head) as pair:
            request = Request(pair, "one", PROMPTS[0], token_count=6)
            await request.run(4)
            return [len(proposal) for _, proposal in request.proposals]

    with caplog.at_level(logging.WARNING):
        lengths = asyncio.run(run())
    assert lengths == [0] + [4] * (len(lengths) - 1)
    sentence = "6 tokens were asked for, but the draft has 4 heads, which propose one token each"
    assert sum(record.getMessage().startswith(sentence) for record in caplog.records) == 1

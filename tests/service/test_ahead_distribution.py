"""Drafting ahead keeps the target's distribution, under residual and block."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.models.loading import LoadedModel, load_model
from tandem.types import GenerationRequest
from tests.end_to_end.chi_square import critical_value, statistic, visible_distance
from tests.end_to_end.models import blurred, save_model
from tests.service.ahead_pair import PROMPT, REQUESTS, hits, pair, small_target
from tests.service.clients import complete_all


@pytest.fixture(scope="module")
def reference() -> Any:
    return small_target()


@pytest.fixture(scope="module")
def target_model(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_model(reference, tmp_path_factory.mktemp("target"))
    return load_model(folder, device="cpu", dtype="float32", threads=1)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target with errors: some of what it proposes is accepted, and some is not."""
    folder = save_model(blurred(small_target(), seed=9, scale=0.2), tmp_path_factory.mktemp("draft"))
    return load_model(folder, device="cpu", dtype="float32", threads=1)


PLACES = slice(2, 5)
"""Positions of the compared tokens, most of which come from rounds with a hit. The first token is the target's own, and
the second begins the round with the first request to the draft."""


def exact(model: Any, request: GenerationRequest) -> dict[tuple[int, ...], float]:
    """Return the target's distribution of the tokens at these positions, by transformers."""
    beginnings: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PLACES.stop):
        contexts = torch.tensor([[*PROMPT, *tokens] for tokens in beginnings])
        with torch.inference_mode():
            logits = model(contexts).logits[:, -1].double() / request.temperature
        top = logits.topk(request.top_k or logits.shape[-1])
        shares = top.values.softmax(dim=-1)
        beginnings = {
            (*tokens, int(token_id)): mass * float(share)
            for (tokens, mass), ids, row in zip(beginnings.items(), top.indices, shares, strict=True)
            for token_id, share in zip(ids, row, strict=True)
        }
    found: Counter[tuple[int, ...]] = Counter()
    for tokens, mass in beginnings.items():
        found[tokens[PLACES]] += mass  # type: ignore[assignment]  # typeshed counts in integers
    return dict(found)


@pytest.mark.parametrize("rule", ["residual", "block"])
@pytest.mark.parametrize(
    ("at_once", "step_seconds", "seeds", "distance"),
    [
        (1, 0.004, 120, 0.45),
        (16, 0.08, 128, 0.45),
        pytest.param(1, 0.004, 1600, 0.15, marks=pytest.mark.soak),
        pytest.param(16, 0.08, 1600, 0.15, marks=pytest.mark.soak),
    ],
)
async def test_the_tokens_have_the_targets_distribution(
    rule: str,
    at_once: int,
    step_seconds: float,
    seeds: int,
    distance: float,
    reference: Any,
    target_model: LoadedModel,
    draft_model: LoadedModel,
) -> None:
    """Chi-square: a deviation by the given total variation distance is detected with a probability above 0.99, and a
    correct implementation fails with a probability of 1 in 10 000, decided once because the seeds are fixed."""
    request = replace(REQUESTS[rule], top_k=3, max_tokens=6, num_speculative_tokens=2)
    requests = [replace(request, seed=seed) for seed in range(seeds)]
    async with (
        pair(target_model, draft_model, step_seconds=step_seconds, max_sequences=16, draft_top_k=2) as both,
        both.coordinated(16) as address,
    ):
        completed = await complete_all(address, requests, at_once)
    assert hits(completed) > seeds / 4
    drafted = sum(each.stats.drafted for each in completed)
    accepted = sum(each.stats.accepted for each in completed)
    assert 0.1 < accepted / drafted < 0.9, "the test needs both accepted and recovered tokens"
    counts = Counter(each.token_ids[PLACES] for each in completed)
    expected = exact(reference, request)
    assert set(counts) <= set(expected)
    value, freedom = statistic(counts, expected)
    assert value < critical_value(freedom)
    assert visible_distance(seeds, freedom) < distance

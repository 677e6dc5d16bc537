"""Over many seeds, the output has the distribution of the target's own tokens.

Each case compares the first three tokens of 800 or more completions with the target's exact distribution, enumerated
with transformers. A deviation by a total variation distance of 0.15 is detected with a probability above 0.99, and a
correct implementation fails with a probability of 1 in 10 000, decided once because the seeds are fixed.
The first token is always the target's own, so only later tokens can show an error of speculation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.types import GenerationRequest, RowKind
from tests.end_to_end.chi_square import critical_value, statistic, visible_distance
from tests.end_to_end.models import Distribution, blurred, exact, load_reference, save_model, six_tokens
from tests.end_to_end.processes import Nursery, address_of, coordinator
from tests.paths import DEMO_TARGET
from tests.service.clients import complete_all

pytestmark = pytest.mark.slow

SEEDS = 1200
DEMO_SEEDS = 800
VISIBLE_DISTANCE = 0.15
LENGTH = 3
MAX_TOKENS = 5
NUM_SPECULATIVE_TOKENS = 3


def small_target() -> Any:
    return six_tokens(7, 2, 64, 0.1)


def small_draft() -> Any:
    """The target with errors: about half of what it proposes is accepted."""
    return blurred(small_target(), seed=9, scale=0.6)


@pytest.fixture(scope="module")
def small_address(services: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator over a pair of small models. The draft's support is smaller than the target's."""
    target = save_model(small_target(), tmp_path_factory.mktemp("small-target"))
    draft = save_model(small_draft(), tmp_path_factory.mktemp("small-draft"))
    target_address = services.started("target_service", target).address
    draft_address = services.started("draft_service", draft, "--draft-top-k", "3").address
    with coordinator(target_address, draft_address) as process:
        yield address_of(process)


async def sampled(address: str, request: GenerationRequest, seeds: int) -> Counter[tuple[int, ...]]:
    """Count the first tokens of completions over the seeds."""
    requests = [
        replace(
            request,
            max_tokens=MAX_TOKENS,
            seed=seed,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
            ignore_eos=True,
        )
        for seed in range(seeds)
    ]
    completed = await complete_all(address, requests)
    assert len({completion.summary.seed for completion in completed}) == seeds
    drafted = sum(completion.stats.drafted for completion in completed)
    accepted = sum(completion.stats.accepted for completion in completed)
    rate = accepted / drafted
    assert 0.1 < rate < 0.9, "the test needs both accepted and recovered tokens"
    return Counter(completion.token_ids[:LENGTH] for completion in completed)


def assert_distributed_as(counts: Counter[tuple[int, ...]], expected: Distribution) -> None:
    assert set(counts) <= set(expected), "a token without target probability was emitted"
    value, freedom = statistic(counts, expected)
    assert value < critical_value(freedom)
    assert visible_distance(counts.total(), freedom) < VISIBLE_DISTANCE


@pytest.mark.parametrize(
    ("strategy", "row_kind"),
    [
        ("residual", RowKind.SUPPORT),
        pytest.param("residual", RowKind.DENSE, marks=pytest.mark.soak),
        pytest.param("block", RowKind.SUPPORT, marks=pytest.mark.soak),
    ],
)
async def test_the_first_tokens_have_the_targets_distribution(
    small_address: str, strategy: str, row_kind: RowKind
) -> None:
    request = GenerationRequest(
        (3, 4), temperature=1.0, top_k=4, rejection_sampling_strategy=strategy, row_kind=row_kind
    )
    counts = await sampled(small_address, request, SEEDS)
    assert_distributed_as(counts, exact(small_target(), request, LENGTH))
    wrong_value, freedom = statistic(counts, exact(small_draft(), request, LENGTH))
    assert wrong_value > critical_value(freedom), "the test must detect the draft's distribution"


async def test_biased_tokens_have_the_biased_targets_distribution(small_address: str) -> None:
    """A minimum of two tokens ends inside a proposal, and the draft knows of neither."""
    request = GenerationRequest(
        (3, 4),
        temperature=1.0,
        top_k=6,
        rejection_sampling_strategy="residual",
        logit_bias={1: 1.5, 3: -2.0},
        min_tokens=2,
        stop_token_ids=(5,),
    )
    counts = await sampled(small_address, request, SEEDS)
    assert_distributed_as(counts, exact(small_target(), request, LENGTH))
    for wrong in (replace(request, logit_bias={}), replace(request, min_tokens=0)):
        wrong_value, freedom = statistic(counts, exact(small_target(), wrong, LENGTH))
        assert wrong_value > critical_value(freedom), "the test must detect a missing adjustment"


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "temperature"), [("residual", 0.7), ("block", 1.0)])
async def test_the_demo_pairs_first_tokens_have_the_targets_distribution(
    address: str, strategy: str, temperature: float
) -> None:
    """With all truncating parameters, and a trained pair."""
    request = GenerationRequest(
        (300, 301), temperature=temperature, top_k=20, top_p=0.9, rejection_sampling_strategy=strategy
    )
    counts = await sampled(address, request, DEMO_SEEDS)
    assert_distributed_as(counts, exact(load_reference(DEMO_TARGET), request, LENGTH))

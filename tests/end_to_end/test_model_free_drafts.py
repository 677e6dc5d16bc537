"""Drafts without a model propose tokens of real source code, and the text stays the target's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.types import GenerationRequest
from tests.end_to_end.processes import address_of, coordinator, service
from tests.service.clients import complete_all

PROMPTS = 4
MAX_TOKENS = 64

METHODS = {
    # Short n-grams are found even in the short prompts of a test.
    "ngram": ("--method", "ngram", "--prompt-lookup-min", "1", "--prompt-lookup-max", "4"),
    "suffix": ("--method", "suffix"),
}


@pytest.fixture(scope="module", params=METHODS)
def model_free_address(request: pytest.FixtureRequest, target_address: str) -> Iterator[str]:
    """A coordinator over the demo target and a draft service without a model."""
    with (
        service("draft_service", *METHODS[request.param]) as draft,
        coordinator(target_address, address_of(draft)) as process,
    ):
        yield address_of(process)


async def test_greedy_completions_are_the_targets_own(model_free_address: str, prompts: list[str]) -> None:
    def requests(*, speculation: bool) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                # The prompt asks for a copy of the beginning, so that text repeats.
                f"{prompt}\n\n{prompt.splitlines()[0]}\n",
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                num_speculative_tokens=4,
                speculation=speculation,
                ignore_eos=True,
            )
            for prompt in prompts[:PROMPTS]
        ]

    alone = await complete_all(model_free_address, requests(speculation=False))
    drafted = await complete_all(model_free_address, requests(speculation=True))
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in alone]
    assert sum(completion.stats.accepted for completion in drafted) > 0

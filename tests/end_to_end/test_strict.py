"""`strict`: the seed and the target alone decide the tokens, with any draft and any proposal length."""

from __future__ import annotations

import pytest

from tandem.types import GenerationRequest
from tests.end_to_end.processes import address_of, coordinator
from tests.service.clients import complete_all

pytestmark = pytest.mark.slow

PROMPTS = 2
MAX_TOKENS = 64


def requests(
    prompts: list[str],
    temperature: float,
    num_speculative_tokens: int | None,
    seed: int = 7,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + i,
            rejection_sampling_strategy="strict",
            num_speculative_tokens=num_speculative_tokens,
            speculation=num_speculative_tokens is not None,
            ignore_eos=True,
        )
        for i, prompt in enumerate(prompts[:PROMPTS])
    ]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.5, None, None), (1.0, 20, 0.9)])
async def test_the_draft_and_its_proposal_length_change_nothing(
    address: str,
    random_draft_coordinator: str,
    prompts: list[str],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    alone = await complete_all(address, requests(prompts, temperature, None, top_k=top_k, top_p=top_p))
    expected = [completion.token_ids for completion in alone]
    assert not any(completion.stats.drafted for completion in alone)
    accepted = []
    for through in (address, random_draft_coordinator):
        batch = [
            request
            for num_speculative_tokens in (1, 2, 4, 8)
            for request in requests(prompts, temperature, num_speculative_tokens, top_k=top_k, top_p=top_p)
        ]
        completed = await complete_all(through, batch)
        assert [completion.token_ids for completion in completed] == expected * 4
        assert all(completion.stats.drafted for completion in completed)
        accepted.append(sum(completion.stats.accepted for completion in completed))
    assert accepted[0] > accepted[1], "the two drafts must differ in what is accepted"


async def test_shrinking_proposals_change_nothing(
    target_address: str, random_draft_address: str, prompts: list[str]
) -> None:
    """Sixteen requests at once with an untrained draft: the adaptive policy proposes little, or nothing at all."""
    adaptive = ("--speculation-policy", "adaptive")
    with coordinator(target_address, random_draft_address, *adaptive) as process:
        address = address_of(process)
        alone = await complete_all(address, requests(prompts, 1.0, None))
        completed = await complete_all(address, 8 * requests(prompts, 1.0, 4))
    assert [completion.token_ids for completion in completed] == 8 * [
        completion.token_ids for completion in alone
    ]
    stats = [completion.stats for completion in completed]
    assert sum(each.drafted for each in stats) < 0.75 * 4 * sum(each.rounds for each in stats)

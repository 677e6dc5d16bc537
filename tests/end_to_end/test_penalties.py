"""Penalties through all three services agree with transformers, with and without a draft."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer

from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest
from tests.end_to_end.models import load_reference
from tests.end_to_end.processes import address_of, coordinator, service
from tests.paths import DEMO_TARGET
from tests.service.clients import complete_all

PROMPTS = 6
MAX_TOKENS = 64
PENALTY = 1.3


@pytest.fixture(scope="module")
def ngram_address(target_address: str) -> Iterator[str]:
    """A coordinator over the demo target and prompt lookup."""
    options = ("--method", "ngram", "--prompt-lookup-min", "1", "--prompt-lookup-max", "3")
    with (
        service("draft_service", *options) as draft,
        coordinator(target_address, address_of(draft)) as process,
    ):
        yield address_of(process)


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[tuple[int, ...]]:
    """Return the tokens of `transformers.generate` with the repetition penalty, which counts the prompt too."""
    model, tokenizer = load_reference(DEMO_TARGET), AutoTokenizer.from_pretrained(DEMO_TARGET)
    continuations = []
    for prompt in prompts[:PROMPTS]:
        token_ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=False,
                repetition_penalty=PENALTY,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=-1,
                pad_token_id=0,
            )
        continuations.append(tuple(whole[0, token_ids.shape[1] :].tolist()))
    return continuations


@pytest.mark.parametrize("speculation", [False, True])
async def test_greedy_completions_with_a_repetition_penalty_agree_with_transformers(
    ngram_address: str, prompts: list[str], expected: list[tuple[int, ...]], speculation: bool
) -> None:
    requests = [
        GenerationRequest(
            prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            repetition_penalty=PENALTY,
            num_speculative_tokens=4,
            speculation=speculation,
            ignore_eos=True,
        )
        for prompt in prompts[:PROMPTS]
    ]
    completed = await complete_all(ngram_address, requests)
    assert [completion.token_ids for completion in completed] == expected
    assert any(completion.stats.drafted for completion in completed) == speculation


async def test_a_draft_does_not_change_completions_with_penalties(
    ngram_address: str, prompts: list[str]
) -> None:
    def requests(*, speculation: bool) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                prompt,
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                frequency_penalty=0.2,
                presence_penalty=0.3,
                num_speculative_tokens=4,
                speculation=speculation,
                ignore_eos=True,
            )
            for prompt in prompts[:PROMPTS]
        ]

    alone = await complete_all(ngram_address, requests(speculation=False))
    drafted = await complete_all(ngram_address, requests(speculation=True))
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in alone]
    assert sum(completion.stats.accepted for completion in drafted) > 0


async def test_penalties_are_refused_with_a_draft_model(address: str, prompts: list[str]) -> None:
    with pytest.raises(
        InvalidRequestError, match="with a separate draft model it must be 1: use a draft service"
    ):
        await complete_all(address, [GenerationRequest(prompts[0], repetition_penalty=PENALTY)])

"""Temperature 0: token for token what transformers makes of the target alone."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tandem.types import FinishReason, GenerationRequest
from tests.end_to_end.models import load_reference
from tests.paths import DEMO_TARGET
from tests.service.clients import complete_all

pytestmark = pytest.mark.slow

PROMPTS = 20
MAX_TOKENS = 128
MAX_LENGTH = 1024
"""The demo pair's."""


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[tuple[int, ...]]:
    """The continuations of `transformers.generate`, with end-of-sequence ids as tokens like any other."""
    model = load_reference(DEMO_TARGET)
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET, padding_side="left")
    batch = tokenizer(prompts[:PROMPTS], return_tensors="pt", padding=True)
    with torch.inference_mode():
        whole = model.generate(
            batch.input_ids, attention_mask=batch.attention_mask, do_sample=False, max_new_tokens=MAX_TOKENS
        )
    continuations = whole[:, batch.input_ids.shape[1] :].tolist()
    assert {len(continuation) for continuation in continuations} == {MAX_TOKENS}
    return [tuple(continuation) for continuation in continuations]


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4, 8])
async def test_greedy_completions_are_the_targets_own(
    address: str,
    prompts: list[str],
    expected: list[tuple[int, ...]],
    num_speculative_tokens: int,
    at_once: int,
) -> None:
    requests = [
        GenerationRequest(
            prompt,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            num_speculative_tokens=num_speculative_tokens,
            ignore_eos=True,
        )
        for prompt in prompts[:PROMPTS]
    ]
    completed = await complete_all(address, requests, at_once)
    assert [completion.token_ids for completion in completed] == expected
    assert all(completion.stats.accepted for completion in completed), "every one was speculated on"


async def test_a_length_that_follows_the_load_changes_no_completion(
    adaptive_address: str, prompts: list[str], expected: list[tuple[int, ...]]
) -> None:
    """The load, and with it the proposals, change within a completion."""
    for at_once in (3, 16):
        requests = [
            GenerationRequest(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            for prompt in prompts[: max(at_once, 3)]
        ]
        completed = await complete_all(adaptive_address, requests, at_once)
        assert [completion.token_ids for completion in completed] == expected[: len(requests)]


@pytest.mark.parametrize("prompt_length", [1, MAX_LENGTH - 1])
async def test_the_shortest_prompt_and_the_longest(
    address: str, prompts: list[str], prompt_length: int
) -> None:
    """The longest leaves room for one token."""
    text = "\n".join(prompts)
    prompt = tuple(Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(text).ids[:prompt_length])
    assert len(prompt) == prompt_length
    request = GenerationRequest(
        prompt, max_tokens=16, temperature=0.0, num_speculative_tokens=4, ignore_eos=True
    )
    (completed,) = await complete_all(address, [request])
    assert completed.finish_reason is FinishReason.LENGTH
    assert len(completed.token_ids) == min(16, MAX_LENGTH - prompt_length)
    whole = torch.tensor([[*prompt, *completed.token_ids]])
    with torch.inference_mode():
        said = load_reference(DEMO_TARGET)(whole).logits[0].argmax(dim=-1)
    assert completed.token_ids == tuple(said[prompt_length - 1 : -1].tolist())

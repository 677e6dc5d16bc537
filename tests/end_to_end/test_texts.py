"""Greedy texts are those of `transformers.generate` with any draft and any proposal length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tandem.clients.client import Completed
from tandem.model.types import GenerationRequest
from tests.end_to_end.models import load_reference
from tests.end_to_end.processes import NO_KERNELS, address_of, coordinator, model_service, service
from tests.paths import DEMO_EAGLE3, DEMO_TARGET
from tests.service.clients import complete_all

pytestmark = pytest.mark.slow

PROMPTS = 8
MAX_TOKENS = 40
PENALTY = 1.3

METHODS = {
    # Short n-grams are found even in the short prompts of a test.
    "ngram": ("--method", "ngram", "--prompt-lookup-min", "1", "--prompt-lookup-max", "4"),
    "suffix": ("--method", "suffix"),
}


def requests(prompts: list[str], *, max_tokens: int = MAX_TOKENS, **options: Any) -> list[GenerationRequest]:
    common = {"temperature": 0.0, "num_speculative_tokens": 4, "ignore_eos": True}
    return [GenerationRequest(prompt, max_tokens=max_tokens, **(common | options)) for prompt in prompts]


def token_ids(completed: list[Completed]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completed]


def accepted(completed: list[Completed]) -> int:
    return sum(each.speculation.accepted for each in completed)


def generated(prompts: list[str], max_tokens: int, **options: Any) -> list[tuple[int, ...]]:
    """The continuations of `transformers.generate`, with end-of-sequence ids as tokens like any other."""
    model = load_reference(DEMO_TARGET)
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET, padding_side="left")
    # Padding would count as text for penalties.
    batches = [[prompt] for prompt in prompts] if options else [prompts]
    continuations: list[tuple[int, ...]] = []
    for batch in batches:
        inputs = tokenizer(batch, return_tensors="pt", padding=True)
        with torch.inference_mode():
            whole = model.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                **options,
            )
        continuations += map(tuple, whole[:, inputs.input_ids.shape[1] :].tolist())
    return continuations


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[tuple[int, ...]]:
    continuations = generated(prompts[:PROMPTS], MAX_TOKENS)
    assert {len(continuation) for continuation in continuations} == {MAX_TOKENS}
    return continuations


@pytest.fixture(scope="module", params=METHODS)
def model_free_address(request: pytest.FixtureRequest, target_address: str) -> Iterator[str]:
    """A coordinator over the demo target and a draft service without a model."""
    with (
        service("tandem_draft", *METHODS[request.param]) as draft,
        coordinator(target_address, address_of(draft)) as process,
    ):
        yield address_of(process)


@pytest.mark.parametrize(("num_speculative_tokens", "at_once"), [(1, PROMPTS), (4, 1), (8, PROMPTS)])
async def test_greedy_completions_are_the_targets_own(
    address: str,
    prompts: list[str],
    expected: list[tuple[int, ...]],
    num_speculative_tokens: int,
    at_once: int,
) -> None:
    count = max(at_once, 4)
    wanted = requests(prompts[:count], num_speculative_tokens=num_speculative_tokens)
    completed = await complete_all(address, wanted, at_once)
    assert token_ids(completed) == expected[:count]
    assert all(completion.speculation.accepted for completion in completed), "every one was speculated on"


async def test_a_draft_without_a_model_changes_no_completion(
    model_free_address: str, prompts: list[str], expected: list[tuple[int, ...]]
) -> None:
    completed = await complete_all(model_free_address, requests(prompts[:PROMPTS]))
    assert token_ids(completed) == expected
    assert accepted(completed) > 0


async def test_the_bundled_head_changes_no_completion(
    prompts: list[str], expected: list[tuple[int, ...]]
) -> None:
    """The demo target with its EAGLE-3 head, served as `tandem up --method eagle3` does."""
    options = ("--draft-model", str(DEMO_EAGLE3), "--dtype", "float32", "--no-draft-repeats", *NO_KERNELS)
    with (
        model_service("tandem_target", DEMO_TARGET, *options) as target,
        coordinator(address_of(target), None, "--rejection-sampling-strategy", "auto") as front,
    ):
        completed = await complete_all(address_of(front), requests(prompts[:3], max_tokens=32))
        assert [front.stop(), target.stop()] == [0, 0]
    assert token_ids(completed) == [each[:32] for each in expected[:3]]
    # It is 0.48 on all prompts; a head that reads wrong states has nearly nothing accepted.
    assert accepted(completed) > 0.2 * sum(each.speculation.drafted for each in completed) > 0


@pytest.fixture(scope="module")
def penalized(prompts: list[str]) -> list[tuple[int, ...]]:
    return generated(prompts[:2], MAX_TOKENS, repetition_penalty=PENALTY)


async def test_a_repetition_penalty_agrees_with_transformers(
    model_free_address: str, prompts: list[str], penalized: list[tuple[int, ...]]
) -> None:
    for speculation in (False, True):
        wanted = requests(prompts[:2], repetition_penalty=PENALTY, speculation=speculation)
        completed = await complete_all(model_free_address, wanted)
        assert token_ids(completed) == penalized
        assert bool(accepted(completed)) == speculation

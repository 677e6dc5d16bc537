"""A completion that begins with its prompt, and the prompt's log probabilities, as lm-eval asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer

from tandem.engine.models.loading import LoadedModel
from tests.end_to_end.models import random_model
from tests.paths import DEMO_TARGET
from tests.service.engines import TINY
from tests.service.test_structured_http import cluster

PROMPT = [300 + 7 * index % 900 for index in range(70)]
"""More than are verified at a time."""
TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
SCORED: dict[str, Any] = {
    "model": "m",
    "temperature": 0,
    "prompt": PROMPT,
    "echo": True,
    "logprobs": 1,
    "seed": 1234,
}


def expected(token_ids: list[int]) -> torch.Tensor:
    """By transformers: log probabilities of each next token, [len(token_ids), vocabulary_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = random_model(1, **TINY)(torch.tensor([token_ids])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_prompt_is_scored_beside_a_draft(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path, max_tokens: int
) -> None:
    async with cluster(model, other_model, tmp_path) as client:
        answer = await client.completions.create(**SCORED, max_tokens=max_tokens)
        stream = await client.completions.create(**SCORED, max_tokens=max_tokens, stream=True)
        pieces = [piece.choices[0] async for piece in stream]
    (choice,) = answer.choices
    assert choice.logprobs is not None
    said, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
    assert len(said) == len(tops) == len(PROMPT) + max_tokens
    assert said[0] is tops[0] is None
    rows = expected(PROMPT)
    for i, token_id in enumerate(PROMPT[1:]):
        assert said[i + 1] == pytest.approx(float(rows[i, token_id]), abs=1e-4)
        assert max(tops[i + 1].values()) == pytest.approx(float(rows[i].max()), abs=1e-4)
    assert choice.text.startswith(TOKENIZER.decode(PROMPT))
    assert (choice.logprobs.text_offset or [])[-1] <= len(choice.text)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), max_tokens)
    assert "".join(piece.text for piece in pieces) == choice.text
    streamed = [each for piece in pieces if piece.logprobs for each in piece.logprobs.token_logprobs or []]
    assert streamed == said


async def test_a_longer_completion_needs_the_target_alone(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path
) -> None:
    asked: Any = {"model": "m", "prompt": "def f(", "max_tokens": 6, "temperature": 0, "echo": True}
    async with cluster(model, other_model, tmp_path) as client:
        with pytest.raises(openai.BadRequestError, match="echo is true and a draft proposes"):
            await client.completions.create(**asked)
        alone: Any = {"extra_body": {"speculation": False}}
        echoed = await client.completions.create(**asked, **alone)
        plain = await client.completions.create(**asked | {"echo": False}, **alone)
        assert echoed.choices[0].text == "def f(" + plain.choices[0].text
        end: Any = {"logit_bias": {"0": 100}, "max_tokens": 2, "echo": False}
        special: Any = {"extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
        marked = await client.completions.create(**asked | end, **special)
        assert marked.choices[0].text == 2 * (TOKENIZER.id_to_token(0) or "")
        with pytest.raises(openai.BadRequestError, match="max_tokens is 0; it must be at least 1"):
            await client.completions.create(**asked | {"echo": False, "max_tokens": 0})
        with pytest.raises(openai.BadRequestError, match="echo is true and logprobs are asked for"):
            await client.completions.create(**SCORED, max_tokens=1, logit_bias=json.loads('{"5": 1}'))


async def test_log_probabilities_are_those_of_the_model(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path
) -> None:
    """In rounds of several tokens, of which the draft proposes some."""
    asked: Any = {**SCORED, "echo": False, "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    async with cluster(model, other_model, tmp_path) as client:
        (choice,) = (await client.completions.create(**asked)).choices
    assert choice.logprobs is not None
    assert choice.model_extra is not None
    token_ids = choice.model_extra["token_ids"]
    rows = expected([*PROMPT, *token_ids])[len(PROMPT) - 1 : -1]
    said = [float(row[token_id]) for row, token_id in zip(rows, token_ids, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(said, abs=1e-4)

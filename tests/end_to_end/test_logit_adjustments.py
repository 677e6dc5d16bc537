"""Logit biases and min_tokens through all three services agree with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tandem.types import GenerationRequest
from tests.commands import run_here
from tests.end_to_end.models import load_reference
from tests.paths import DEMO_TARGET
from tests.service.clients import complete_all

PROMPTS = 3
MAX_TOKENS = 40
MIN_TOKENS = 17


@pytest.mark.parametrize("speculation", [False, True])
async def test_greedy_completions_agree_with_transformers(
    address: str, prompts: list[str], speculation: bool
) -> None:
    model, tokenizer = load_reference(DEMO_TARGET), AutoTokenizer.from_pretrained(DEMO_TARGET)
    newline = int(tokenizer("\n").input_ids[-1])
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "num_speculative_tokens": 4}
    plain = [
        GenerationRequest(prompt, speculation=speculation, ignore_eos=True, **options)
        for prompt in prompts[:PROMPTS]
    ]
    unbiased = [completion.token_ids for completion in await complete_all(address, plain)]
    bias = dict.fromkeys((token_ids[1] for token_ids in unbiased), -5.0) | {newline: 2.0}
    biased = [
        GenerationRequest(
            prompt,
            speculation=speculation,
            logit_bias=bias,
            min_tokens=MIN_TOKENS,
            stop_token_ids=(newline,),
            **options,
        )
        for prompt in prompts[:PROMPTS]
    ]
    completed = await complete_all(address, biased)
    expected = []
    for prompt in prompts[:PROMPTS]:
        token_ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=False,
                sequence_bias=[[[token_id], value] for token_id, value in bias.items()],
                min_new_tokens=MIN_TOKENS,
                eos_token_id=[model.config.eos_token_id, newline],
                max_new_tokens=MAX_TOKENS,
                pad_token_id=0,
            )
        expected.append(tuple(whole[0, token_ids.shape[1] :].tolist()))
    assert [completion.token_ids for completion in completed] == expected
    assert expected != unbiased
    assert all(len(token_ids) > MIN_TOKENS for token_ids in expected)
    assert any(completion.summary.stop_reason == newline for completion in completed)
    assert any(completion.stats.accepted for completion in completed) == speculation


def test_the_command_sends_the_options(address: str) -> None:
    command = ("generate", "def f", "--address", address, "--temperature", "0", "--max-tokens", "4")
    plain = run_here(*command, "--logit-bias", "300:100", "--min-tokens", "2", "--stop-token-id", "300")
    assert plain.returncode == 0
    assert plain.stdout.count("\n") <= 1 + plain.stdout.count("\n\n")
    refused = run_here(*command, "--logit-bias", "300=1")
    assert "--logit-bias is '300=1'; it must be ID:BIAS" in refused.stderr

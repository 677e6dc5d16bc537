"""vLLM's own drafting heads in the steps of a target: they propose what independent references do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.model_sources.bundled import demo_pair
from tests.end_to_end.models import load_reference
from tests.end_to_end.processes import TANDEM, address_of, coordinator
from tests.end_to_end.processes import running as process_of
from tests.end_to_end.test_campaign import request as requested
from tests.heads import Eagle3Reference, MedusaReference
from tests.paths import DEMO_EAGLE3, DEMO_TARGET, DEVICE
from tests.service.clients import complete_all
from tests.unit.engine.greedy import most_probable
from tests.unit.target_service.test_head_drafter import Reference, Request, running

pytestmark = pytest.mark.timeout(600)

OPTIONS: dict[str, Any] = {
    "engine": "vllm",
    "device": DEVICE,
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
SERVED = ("--engine", "vllm", "--enforce-eager", "--dtype", "float32", "--threads", "1", "--port", "0")
TEXTS = ("def add(a, b):\n", "class Stack:\n", "import os\n\n", "for each in range(10):\n")
PROMPTS = [tuple(300 + (7 * row + column) % 900 for column in range(4 + 17 * row)) for row in range(5)]
HEADS: dict[str, tuple[Path, Callable[[Path, Any], Reference]]] = {
    "eagle3": (DEMO_EAGLE3, Eagle3Reference),
    "medusa": (demo_pair().head("medusa"), MedusaReference),
}


@pytest.mark.parametrize("method", HEADS)
async def test_proposals_are_the_references_and_texts_the_targets(method: str) -> None:
    model = load_reference(DEMO_TARGET)
    head, make_reference = HEADS[method]
    reference = make_reference(head, model)
    async with running(DEMO_TARGET, head, **OPTIONS) as verifier:
        requests = [Request(verifier, str(index), prompt) for index, prompt in enumerate(PROMPTS)]
        texts = await asyncio.gather(*(request.run(40) for request in requests))
    lengths = [(request, *proposed) for request in requests for proposed in request.proposals[1:]]
    proposed = [(request, length, proposal) for request, length, proposal in lengths if proposal]
    # One that shares a step with others may have to do without where nobody knew yet what its round came to.
    assert len(proposed) > 0.75 * len(lengths)
    differing = [
        length
        for request, length, proposal in proposed
        if list(proposal) != reference.propose(request.tokens[:length], 4)
    ]
    assert len(differing) <= 0.03 * len(proposed), "but for tokens that are as probable as another"
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == most_probable(model, prompt, text)


RULES = ("greedy", "strict", "residual", "block", "typical-acceptance", "logit-comparison")


@pytest.fixture(scope="module", params=HEADS)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """The demo target with a head."""
    head, _ = HEADS[request.param]
    words = ("--model", str(DEMO_TARGET), "--draft-model", str(head), "--num-speculative-tokens", "4")
    with process_of(TANDEM, "serve", "target", *words, *SERVED) as process:
        yield address_of(process)


@pytest.mark.parametrize("lead", [0, 1, 4])
async def test_heads_change_no_text(address: str, lead: int) -> None:
    """Led rounds and others, alone and together."""
    asked = [requested(prompt, rule, 48) for rule in ("greedy", "strict") for prompt in TEXTS]
    with coordinator(address, None, "--target-lead", str(lead)) as process:
        expected = await complete_all(
            address_of(process), [replace(each, speculation=False) for each in asked], 4
        )
        for at_once in (1, 4):
            found = await complete_all(address_of(process), asked, at_once)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected], at_once
            drafted = sum(each.speculation.drafted for each in found)
            accepted = sum(each.speculation.accepted for each in found)
            led = sum(each.speculation.lead.rounds for each in found)
            rounds = sum(each.speculation.rounds for each in found)
            print("FIG", lead, at_once, rounds, led, drafted, accepted)
            assert accepted > 0.1 * drafted > 0
            assert (led > 0.5 * rounds) == (lead > 0)

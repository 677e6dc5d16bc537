"""Real processes whose models vLLM runs: a client gets the target's text, or its distribution."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.model.types import FinishReason, GenerationRequest, Grammar, GrammarKind, RowKind
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import blurred, exact, save_model, six_tokens
from tests.end_to_end.processes import AHEAD, TANDEM, Process, address_of, coordinator, running
from tests.end_to_end.test_campaign import request as requested
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.clients import complete_all

pytestmark = pytest.mark.timeout(1800)

OPTIONS = ("--engine", "vllm", "--enforce-eager", "--dtype", "float32", "--threads", "1", "--port", "0")
PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n\n", "for each in range(10):\n")
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{20,40}$"},
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
)
REQUESTS = [requested(prompt, rule, 32) for rule in ("greedy", "strict") for prompt in PROMPTS]


@contextmanager
def served(target: Path, draft: Path, *options: str) -> Iterator[tuple[Process, Process]]:
    """Both models; the options are the draft's."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(running(TANDEM, "serve", *words, *OPTIONS))
            for words in (("target", "--model", str(target)), ("draft", "--model", str(draft), *options))
        ]
        for each in processes:
            address_of(each)
        yield processes[0], processes[1]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    """The demo pair."""
    with served(DEMO_TARGET, DEMO_DRAFT) as processes:
        yield processes


def small_target() -> Any:
    return six_tokens(7, 2, 64, 0.1)


@pytest.fixture(scope="module")
def small_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator over a pair whose distributions can be enumerated. The draft has three tokens of six to propose."""
    # The draft is the target with errors: about half of what it proposes is accepted.
    models = small_target(), blurred(small_target(), seed=9, scale=0.6)
    folders = [save_model(model, tmp_path_factory.mktemp("small")) for model in models]
    with (
        served(folders[0], folders[1], "--draft-top-k", "3") as (target, draft),
        coordinator(address_of(target), address_of(draft)) as process,
    ):
        yield address_of(process)


@pytest.mark.parametrize(
    ("rule", "row_kind"),
    [("strict", RowKind.TOKEN), ("residual", RowKind.SUPPORT), ("block", RowKind.SUPPORT)],
)
async def test_every_lossless_rule_has_the_targets_distribution(
    small_address: str, rule: str, row_kind: RowKind
) -> None:
    request = GenerationRequest(
        (3, 4), temperature=1.0, top_k=4, rejection_sampling_strategy=rule, row_kind=row_kind
    )
    requests = [
        replace(request, max_tokens=5, num_speculative_tokens=3, ignore_eos=True, seed=seed)
        for seed in range(1200)
    ]
    first = slice(0, 3)
    completed = await complete_all(small_address, requests)
    assert_drawn_from(exact(small_target(), request, first.stop), completed, first, 0.15)


def test_attention_may_use_the_tile_unit() -> None:
    """A process that uses it and has not asked for it is ended by SIGILL. No product of this draft asks."""
    options = (*OPTIONS, "--dtype", "bfloat16", "--no-enable-prefix-caching", "--threads", "2")
    with running(TANDEM, "serve", "draft", "--model", str(DEMO_DRAFT), *options) as process:
        assert process.line("ready on")
        assert process.stop() == 0


async def test_neither_draft_nor_lead_nor_batch_changes_the_text(pair: tuple[Process, Process]) -> None:
    """Running ahead where nothing is proposed, and verifying ahead where the draft drafts ahead."""
    target, draft = map(address_of, pair)
    expected: list[tuple[int, ...]] = []
    for lead in (0, 2, 8):
        with coordinator(target, draft, *AHEAD, "--target-lead", str(lead)) as process:
            for at_once in (1, 4):
                alone = await complete_all(
                    address_of(process), [replace(each, speculation=False) for each in REQUESTS], at_once
                )
                expected = expected or [each.token_ids for each in alone]
                assert [each.token_ids for each in alone] == expected, (lead, at_once)
                led = [each.speculation.lead.rounds for each in alone]
                assert led == [len(each.token_ids) - 1 if lead else 0 for each in alone]
                found = await complete_all(address_of(process), REQUESTS, at_once)
                assert [each.token_ids for each in found] == expected, (lead, at_once)
                assert all(each.speculation.accepted for each in found)
                assert any(each.speculation.lead.rounds for each in found) == (lead > 0)


@pytest.mark.parametrize("rule", ["greedy", "strict", "residual"])
async def test_structured_output_is_valid_and_drafted_for(pair: tuple[Process, Process], rule: str) -> None:
    """The draft heeds the grammar: without, hardly a proposal of a random word would be accepted."""
    asked = [
        replace(
            requested(prompt, "greedy" if rule == "greedy" else "strict", 200),
            grammar=SCHEMA,
            ignore_eos=False,
            rejection_sampling_strategy=rule,
        )
        for prompt in PROMPTS
    ]
    alone = [replace(each, speculation=False) for each in asked]
    with coordinator(*map(address_of, pair), *AHEAD, "--target-lead", "4") as process:
        found = await complete_all(address_of(process), asked)
        expected = await complete_all(address_of(process), alone)
    for each in (*found, *expected):
        assert each.finish_reason is FinishReason.STOP
        assert re.fullmatch(r'\{"name": "[a-z]{20,40}", "age": [0-9]{1,2}\}', each.text)
    if rule != "residual":
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    # Forced text is accepted with and without a draft.
    accepted, jumped = (sum(one.speculation.accepted for one in each) for each in (found, expected))
    assert accepted > jumped

"""Grammars through all services: every rule keeps to them, and speculation changes no text that it must not."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tandem.clients.client import Completed
from tandem.engine.models.loading import LoadedModel
from tandem.engine.rows import apply_masks
from tandem.errors import InvalidRequestError, TandemError
from tandem.model.grammar import Grammars, known_tokens
from tandem.model.types import (
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    ModelInfo,
    RowKind,
    TokenRow,
    Verification,
)
from tandem_draft.proposers.ngram import ngram_proposer
from tandem_draft.proposers.standalone import StandaloneProposer
from tandem_draft.proposers.suffix import suffix_proposer
from tandem_target.verifier import Verifier
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import random_model
from tests.paths import DEMO_TARGET
from tests.service import engines
from tests.service.clients import complete
from tests.service.engines import TINY, Faults, MakePair, NewProposer, model_free

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["ü", "beta"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORD = Grammar(GrammarKind.REGEX, "(a|bc){2,9}d{2,4}e")
REQUEST = GenerationRequest(
    "def f(", max_tokens=80, temperature=1.0, seed=4, num_speculative_tokens=3, grammar=JSON
)
RULES = ("strict", "residual", "block", "typical-acceptance", "logit-comparison")
TOKENIZER = DEMO_TARGET / "tokenizer.json"


def assert_fits(completed: Completed) -> None:
    value = json.loads(completed.text)
    assert [*value] == ["name", "age", "tags"]
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 99
    assert set(value["tags"]) <= {"ü", "beta"}
    assert len(value["tags"]) <= 2
    assert completed.finish_reason is FinishReason.STOP
    assert completed.summary.stop_reason is None


async def test_every_rule_keeps_to_the_grammar(pair: MakePair) -> None:
    async with pair(allowed_rejection_sampling_strategies=RULES) as (client, _):
        requests = [replace(REQUEST, temperature=0.0)]
        requests += [replace(REQUEST, rejection_sampling_strategy=rule) for rule in RULES]
        requests += [
            replace(REQUEST, rejection_sampling_strategy="residual", row_kind=RowKind.DENSE, logprobs=2)
        ]
        for request in requests:
            assert_fits(await complete(client, request))
            word = await complete(client, replace(request, grammar=WORD))
            assert re.fullmatch("(a|bc){2,9}d{2,4}e", word.text)


class _Engine:
    """As much of an engine as a service's start needs."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def start(self) -> None: ...

    async def warm_up(self) -> None: ...


async def test_services_learn_the_tokens_by_their_bytes_before_they_are_ready(
    model: LoadedModel, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's lock is held meanwhile, for 7 s where the tokens are 262k."""
    learnt = []

    def counted(*arguments: Any, **named: Any) -> Any:
        learnt.append(1)
        return known_tokens(*arguments, **named)

    monkeypatch.setattr("tandem.model.grammar.known_tokens", counted)
    engine: Any = _Engine(model.info)
    await Verifier(engine, [TOKENIZER]).start()
    assert len(learnt) == 1
    await StandaloneProposer(engine, 8, grammars=Grammars.of(TOKENIZER, model.info)).start()
    assert len(learnt) == 2
    async with pair():  # whose services are not started as services are
        assert len(learnt) == 3, "the coordinator's"


@pytest.mark.parametrize("options", [{}, {"draft_ahead": "4"}], ids=["plain", "drafting ahead"])
async def test_greedy_and_strict_texts_are_those_of_the_target_alone(
    pair: MakePair, options: dict[str, Any]
) -> None:
    """With leads of the target as well, and when the target is lost."""
    faults = (Faults(before={9}), Faults(after={12}), Faults())
    async with pair(*faults, target_lead=4, **options) as (client, _):
        for request in (
            replace(REQUEST, temperature=0.0),
            replace(REQUEST, rejection_sampling_strategy="strict"),
        ):
            for grammar in (JSON, WORD):
                own = replace(request, grammar=grammar)
                alone = await complete(client, replace(own, speculation=False))
                together = await complete(client, own)
                assert (together.text, together.token_ids) == (alone.text, alone.token_ids)
                assert together.speculation.rounds < len(together.token_ids)


async def test_leads_change_no_text_and_are_not_wasted_on_forced_text(pair: MakePair) -> None:
    """A target that leads stops where the coordinator proposes without a model, and where the text ends."""
    texts: dict[tuple[Grammar, bool], Completed] = {}
    for lead in (0, 8):
        async with pair(target_lead=lead, draft_ahead="4") as (client, _):
            for grammar, speculation in itertools.product((JSON, WORD), (False, True)):
                request = replace(
                    REQUEST, grammar=grammar, speculation=speculation, rejection_sampling_strategy="strict"
                )
                found = await complete(client, request)
                plain = texts.setdefault((grammar, speculation), found)
                assert found.token_ids == plain.token_ids == texts[grammar, False].token_ids
                if not speculation:
                    assert (found.speculation.lead.rounds > 0) == (lead > 0)
                    assert found.speculation.lead.wasted == 0
                    assert found.speculation.rounds == plain.speculation.rounds, (
                        "forced text takes no more rounds"
                    )


@pytest.mark.parametrize("new", [ngram_proposer, suffix_proposer])
async def test_no_forbidden_token_of_a_draft_without_a_model_is_verified(
    model: LoadedModel, new: NewProposer
) -> None:
    """The prompt repeats what the grammar forbids behind its first characters."""
    faults = Faults()
    grammar = Grammar(GrammarKind.REGEX, "(a|b|c|d| ){60}e")
    prompt = tuple(Tokenizer.from_file(str(TOKENIZER)).encode("a b c d x y a b c d z " * 8).ids)
    request = replace(REQUEST, prompt=prompt, grammar=grammar, rejection_sampling_strategy="strict")
    drafting = model_free(new, prompt_lookup_min=1)
    async with engines.pair(model, drafting, faults, target_lead=0) as (client, _):
        together = await complete(client, request)
        proposals = [*faults.proposals]
        alone = await complete(client, replace(request, speculation=False))
    assert together.token_ids == alone.token_ids
    assert re.fullmatch("[a-d ]{60}e", together.text)
    state = Grammars(TOKENIZER.read_text, model.info.vocabulary_size, [0]).compiled(grammar)
    assert sum(len(proposed) for _, proposed in proposals) > 3
    for base_length, proposed in proposals:
        assert state.follow([*together.token_ids[: base_length - len(prompt)]])
        assert state.allowed_count(proposed) == len(proposed)


async def test_forced_text_takes_a_round(pair: MakePair) -> None:
    async with pair() as (client, _):
        request = replace(REQUEST, grammar=Grammar(GrammarKind.CHOICE, '["a long text of many words"]'))
        completed = await complete(client, replace(request, speculation=False))
        assert completed.text == "a long text of many words"
        stats = completed.speculation
        assert stats.rounds == 1 < len(completed.token_ids) == stats.forced
        assert (stats.drafted, stats.accepted) == (0, 0), "no model proposed it"


async def test_a_target_that_does_not_heed_the_grammar_is_found_out(pair: MakePair) -> None:
    def careless(answer: Verification) -> Verification:
        return replace(answer, rows=tuple(TokenRow(5) for _ in answer.rows))

    faults = Faults(garbled={2: careless})
    async with pair(faults, target_lead=0) as (client, _):
        with pytest.raises(TandemError, match="token id 5 is forbidden by the request's grammar"):
            await complete(client, replace(REQUEST, grammar=WORD, temperature=0.0, speculation=False))


async def test_refusals_name_what_is_wrong(pair: MakePair) -> None:
    bad = replace(REQUEST, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}'))
    async with pair(max_grammar_bytes=100) as (client, _):
        with pytest.raises(InvalidRequestError, match="Unimplemented keys"):
            await complete(client, bad)
        with pytest.raises(InvalidRequestError, match="json_schema has 101 bytes; it must be at most 100"):
            await complete(client, replace(REQUEST, grammar=Grammar(GrammarKind.JSON_SCHEMA, " " * 101)))
    async with pair(structured_output="refuse") as (client, _):
        with pytest.raises(InvalidRequestError, match=r"a json_schema is asked for .* is refuse"):
            await complete(client, REQUEST)


@pytest.mark.parametrize("rule", ["residual", "block"])
async def test_texts_have_the_masked_targets_distribution(
    model: LoadedModel, pair: MakePair, rule: str
) -> None:
    """Chi-square over all completions of a small grammar; their probabilities come from the target's own module."""
    grammar = Grammar(GrammarKind.REGEX, "[ab][cd][ab]")
    state = Grammars(TOKENIZER.read_text, model.info.vocabulary_size, [0]).compiled(grammar)
    prompt = (300, 301)
    reference = random_model(1, **TINY)
    expected: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    while growing:
        tokens, mass = growing.popitem()
        assert state.follow([*tokens])
        if state.is_over:
            expected[tokens] = mass
            continue
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens]])).logits[:, -1]
        probs = apply_masks(logits, state.masks(tokens, ()))[0].double().softmax(-1)
        growing |= {(*tokens, int(i)): mass * float(probs[i]) for i in probs.nonzero().flatten()}
    async with pair() as (client, _):
        request = replace(REQUEST, prompt=prompt, grammar=grammar, rejection_sampling_strategy=rule)
        texts = await asyncio.gather(*(complete(client, replace(request, seed=seed)) for seed in range(80)))
    assert_drawn_from(expected, texts, distance=0.45)


LINK = {"type": "object", "properties": {"x": {"$ref": "#/$defs/link"}}, "required": ["x"]}
BEYOND_LIMITS: dict[str, dict[str, Any]] = {
    "an endless reference": {"$ref": "#", "type": "object"},
    "endless objects": {"$ref": "#/$defs/link", "$defs": {"link": LINK}},
    "endless arrays": {
        "$ref": "#/$defs/list",
        "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}},
    },
    "endless objects behind a text": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"$ref": "#/$defs/link"}},
        "required": ["a", "b"],
        "$defs": {"link": LINK},
    },
    "too many items behind a text": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "b": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", BEYOND_LIMITS)
async def test_a_schema_beyond_the_limits_is_refused_at_once(
    pair: MakePair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever its limits are met, and not by one target after the other."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(BEYOND_LIMITS[name]))
    async with pair(Faults(), Faults(), target_lead=0) as (client, _):
        for speculation in (True, False):
            request = replace(REQUEST, temperature=0.0, grammar=grammar, speculation=speculation)
            with pytest.raises(InvalidRequestError, match="json_schema cannot be used") as raised:
                await complete(client, request)
            assert "target" not in str(raised.value)
        assert_fits(await complete(client, replace(REQUEST, temperature=0.0)))
    assert not [record for record in caplog.records if record.message.startswith("target lost")]

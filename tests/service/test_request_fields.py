"""Fields of a request that say what a completion may hold, what is told of its prompt, and when it is served."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.engine.models.loading import LoadedModel
from tandem.errors import InvalidRequestError
from tandem.model.types import GenerationRequest, Grammar, GrammarKind, RowKind, TruncationSide
from tandem_draft.proposers.ngram import ngram_proposer
from tests.end_to_end.models import load_reference
from tests.service.clients import complete, complete_all, until
from tests.service.engines import model_free, pair, tiny_model
from tests.service.fakes import FakeDraft, FakeTarget, cluster, fleet, paced
from tests.service.http_cluster import TOKENIZER
from tests.unit.engine.greedy import plain_logits

GREEDY = GenerationRequest(
    "def f(", max_tokens=12, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
RULES = ("strict", "residual", "block")


def holds(token_ids: Sequence[int], sequence: Sequence[int]) -> bool:
    count = len(sequence)
    return any(
        tuple(token_ids[start : start + count]) == tuple(sequence)
        for start in range(len(token_ids) - count + 1)
    )


def sequences_of(word: str) -> list[tuple[int, ...]]:
    """What a bad word forbids, by vLLM's definition."""
    plain = tuple(TOKENIZER.encode(word, add_special_tokens=False).ids)
    spaced = tuple(TOKENIZER.encode(f" {word}", add_special_tokens=False).ids)
    return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]


@pytest.mark.parametrize("kind", ["draft", "ngram", "ahead"])
async def test_what_may_not_be_written_never_is_whatever_is_proposed(
    kind: str, model: LoadedModel, other_model: LoadedModel
) -> None:
    """The draft knows nothing of it, so it proposes what is forbidden all the time."""
    options: dict[str, Any] = {"speculation_policy": "fixed", "target_lead": 4}
    if kind == "ahead":
        options["draft_ahead"] = 4
    drafting = model_free(ngram_proposer, prompt_lookup_min=1) if kind == "ngram" else other_model
    async with pair(model, drafting, **options) as (client, _):
        (free,) = await complete_all(client.address, [GREEDY])
        # What greedy text holds is what matters: two tokens of it, and a text of two tokens
        banned = TOKENIZER.decode(list(free.token_ids[2:4]))
        single = TOKENIZER.decode([free.token_ids[0]])
        few = tuple(sorted({300, 301, 302, 400, 500} - {free.token_ids[0]}))
        base = [GREEDY, replace(GREEDY, prompt=few * 3)]
        base += [
            replace(GREEDY, temperature=1.0, seed=seed, rejection_sampling_strategy=rule)
            for seed, rule in enumerate(RULES)
        ]
        changes: list[dict[str, Any]] = [
            {"allowed_token_ids": few},
            {"bad_words": (banned, single)},
            {"allowed_token_ids": few, "bad_words": (TOKENIZER.decode([few[0]]),), "logprobs": 2},
            {
                "allowed_token_ids": few,
                "logit_bias": {few[1]: 3.0},
                "frequency_penalty": 1.0,
                "min_tokens": 4,
            },
        ]
        requests = [replace(each, **change) for each in base for change in changes]
        found = await complete_all(client.address, requests, 4)
        alone = await complete_all(client.address, [replace(each, speculation=False) for each in requests], 4)
    assert sum(each.speculation.drafted for each in found) > 0
    for request, with_draft, without in zip(requests, found, alone, strict=True):
        for each in (with_draft, without):
            assert len(each.token_ids) == 12
            if request.allowed_token_ids:
                assert set(each.token_ids) <= set(request.allowed_token_ids)
            for word in request.bad_words:
                assert not any(holds(each.token_ids, sequence) for sequence in sequences_of(word)), word
            assert all(math.isfinite(top) for at in each.logprobs for top in (at.logprob, *at.top_logprobs))
        if request.temperature == 0.0 or request.rejection_sampling_strategy == "strict":
            assert with_draft.token_ids == without.token_ids
    assert all(each.token_ids != free.token_ids for each in found[:2]), "or nothing is shown"


async def test_a_bad_word_is_the_one_of_the_completion_and_not_of_the_prompt() -> None:
    """After 10 follows 11; only the sequence 12, 13 in the completion is stopped, and by its last token."""
    # A fake target does not adjust logits: this asks the real one
    requests = GenerationRequest((10, 11), bad_words=("x",), max_tokens=2)
    async with cluster(FakeTarget()) as client:
        assert len((await complete(client, requests)).token_ids) == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"allowed_token_ids": (5, 9999)},
        "allowed_token_ids holds token id 9999, out of vocabulary; ids must be in 0..2047",
    ),
    ({"allowed_token_ids": tuple(range(1025))}, "allowed_token_ids has 1025 ids; it must be at most 1024"),
    ({"bad_words": (" ",)}, "bad_words holds an empty text"),
    ({"bad_words": ("a",) * 257}, "bad_words has 257 texts; it must be at most 256"),
    ({"bad_words": ("a" * 257,)}, "bad_words holds a text of 257 characters; it must be at most 256"),
    (
        {"allowed_token_ids": (3,), "min_tokens": 1, "stop_token_ids": (3,)},
        "allowed_token_ids is set so that no token may be left",
    ),
    ({"priority": 1 << 31}, "priority is 2147483648; it must be from -2147483648 to 2147483647"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be between 0 and 20"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1, or from 1 to 63"),
    ({"truncate_prompt_tokens": 64}, "truncate_prompt_tokens is 64; it must be -1, or from 1 to 63"),
    (
        {"sampled_logprobs": True, "row_kind": RowKind.DENSE},
        "sampled_logprobs is true and row_kind is dense; row_kind must be left out, or token or support",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
async def test_wrong_values_are_refused_and_nothing_runs(change: dict[str, Any], sentence: str) -> None:
    target = FakeTarget()
    async with cluster(target, FakeDraft()) as client:
        with pytest.raises(InvalidRequestError) as refusal:
            await complete(client, replace(GREEDY, **change))
    assert sentence in str(refusal.value)
    assert target.longest == 0, "nothing of it was computed"


async def test_one_word_may_leave_no_token() -> None:
    word_id = TOKENIZER.encode("def", add_special_tokens=False).ids
    assert len(word_id) == 1
    async with cluster(FakeTarget()) as client:
        request = replace(GREEDY, allowed_token_ids=tuple(word_id), bad_words=("def",))
        with pytest.raises(
            InvalidRequestError, match="allowed_token_ids and bad_words are set so that no token"
        ):
            await complete(client, request)


# ---- what is told of the completion


@pytest.mark.parametrize("kind", ["draft", "ngram", "ahead", "alone"])
async def test_log_probabilities_are_those_of_dense_rows_and_cost_no_lead(
    kind: str, model: LoadedModel, other_model: LoadedModel
) -> None:
    options: dict[str, Any] = {"speculation_policy": "fixed", "target_lead": 4}
    if kind == "ahead":
        options["draft_ahead"] = 4
    drafting: Any = {"ngram": model_free(ngram_proposer, prompt_lookup_min=1), "alone": None}.get(
        kind, other_model
    )
    base = [GREEDY, replace(GREEDY, prompt=(300, 301) * 4)] + [
        replace(GREEDY, temperature=temperature, seed=seed, rejection_sampling_strategy=rule, top_k=top_k)
        for seed, (rule, (temperature, top_k)) in enumerate(itertools.product(RULES, ((0.7, 0), (1.5, 20))))
    ]
    changes: list[dict[str, Any]] = [
        {"logprobs": 0},
        {"logprobs": 3},
        {"logprobs": 20, "allowed_token_ids": (300, 301, 302), "logit_bias": {301: 1.0}},
    ]
    requests = [replace(each, **change) for each in base for change in changes]
    async with pair(model, drafting, **options) as (client, _):
        found = await complete_all(client.address, requests, 4)
        dense = await complete_all(
            client.address, [replace(each, row_kind=RowKind.DENSE) for each in requests], 4
        )
        silent = await complete_all(client.address, [replace(each, logprobs=None) for each in requests], 4)
    for request, beside, of_rows, without in zip(requests, found, dense, silent, strict=True):
        assert beside.token_ids == of_rows.token_ids == without.token_ids
        assert beside.speculation.lead.rounds == without.speculation.lead.rounds or kind in ("ahead", "ngram")
        assert len(beside.logprobs) == len(beside.token_ids)
        for at, expected in zip(beside.logprobs, of_rows.logprobs, strict=True):
            assert at.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert at.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)
            assert len(at.top_token_ids) == min(request.logprobs or 0, len(request.allowed_token_ids) or 20)
    if kind == "alone":
        assert all(each.speculation.lead.rounds == 11 for each in found)


@pytest.mark.parametrize("kind", ["draft", "ahead", "alone"])
async def test_sampled_log_probabilities_are_those_of_the_model_and_of_what_was_drawn_from(
    kind: str, tmp_path: Path, other_model: LoadedModel
) -> None:
    """The reference computes them by transformers, in one pass over each finished text."""
    model = tiny_model(tmp_path)
    options: dict[str, Any] = {"speculation_policy": "fixed", "target_lead": 4}
    if kind == "ahead":
        options["draft_ahead"] = 4
    prompt = tuple(TOKENIZER.encode("def f(").ids)
    greedy = replace(GREEDY, prompt=prompt)
    base = [greedy] + [
        replace(greedy, temperature=temperature, seed=3, rejection_sampling_strategy=rule, top_k=top_k)
        for rule, temperature, top_k in (("strict", 0.7, 20), ("residual", 1.5, 0), ("block", 0.7, 20))
    ]
    changes: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"logit_bias": {301: 4.0}, "allowed_token_ids": (300, 301, 302), "logprobs": 0},
        {"grammar": Grammar(GrammarKind.REGEX, "[0-9]{6}"), "ignore_eos": False},
    ]
    silent = [replace(each, **change) for each in base for change in changes]
    requests = [replace(each, sampled_logprobs=True) for each in silent]
    drafting = None if kind == "alone" else other_model
    async with pair(model, drafting, **options) as (client, _):
        found = await complete_all(client.address, requests, 4)
        others = await complete_all(client.address, silent, 4)
    reference = load_reference(tmp_path)
    for request, each, without in zip(requests, found, others, strict=True):
        assert each.token_ids == without.token_ids, "they change no text"
        assert without.raw_logprobs == ()
        count = len(each.token_ids)
        assert len(each.raw_logprobs) == len(each.processed_logprobs) == count
        logits = plain_logits(reference, (*request.prompt, *each.token_ids)).double()
        logits = logits[len(request.prompt) - 1 :][:count]
        rows = zip(logits, each.token_ids, each.raw_logprobs, each.processed_logprobs, strict=True)
        for row, token_id, raw, processed in rows:
            assert raw == pytest.approx(float(row.log_softmax(dim=-1)[token_id]), abs=1e-4)
            if request.grammar is not None:
                assert processed > raw, "most tokens are forbidden"
            else:
                assert processed == pytest.approx(drawn_logprob(row, request, token_id), abs=1e-4)
    if kind != "alone":
        assert sum(each.speculation.accepted for each in found) > 0
    else:
        assert sum(each.speculation.lead.rounds for each in found) == sum(
            each.speculation.lead.rounds for each in others
        )


def drawn_logprob(row: Tensor, request: GenerationRequest, token_id: int) -> float:
    """The log probability under the request's bias, allowed tokens, temperature and top-k, by their definitions."""
    if request.temperature == 0.0:
        return 0.0
    row = row.clone()
    for biased, bias in request.logit_bias.items():
        row[biased] += bias
    if request.allowed_token_ids:
        others = [each for each in range(len(row)) if each not in request.allowed_token_ids]
        row[others] = -math.inf
    if request.top_k:
        row[row < row.topk(request.top_k).values[-1]] = -math.inf
    assert request.temperature is not None
    return float((row / request.temperature).log_softmax(dim=-1)[token_id])


async def test_a_rule_that_replaces_tokens_by_the_argmax_says_how_probable_it_was(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    """The argmax may be none of the row's own tokens otherwise."""
    request = replace(
        GREEDY,
        temperature=1.0,
        seed=1,
        rejection_sampling_strategy="logit-comparison",
        sampled_logprobs=True,
        max_tokens=24,
    )
    options: dict[str, Any] = {"allowed_rejection_sampling_strategies": "logit-comparison"}
    async with pair(model, other_model, speculation_policy="fixed", **options) as (client, _):
        found = await client.complete(request)
    assert found.speculation.accepted < found.speculation.drafted
    assert all(math.isfinite(each) for each in (*found.raw_logprobs, *found.processed_logprobs))


# ---- what is told of the prompt


async def test_prompts_are_scored_as_transformers_scores_them(
    tmp_path: Path, other_model: LoadedModel
) -> None:
    """With a draft, and beside everything that changes the completion's logits: they are the prompt's own."""
    model = tiny_model(tmp_path)
    prompt = tuple(TOKENIZER.encode("def read_lines(path):\n    with open(path) as file:\n" * 3).ids)
    assert len(prompt) > 33, "more than one message"
    plain = replace(GREEDY, prompt=prompt, ignore_eos=False)
    changes: list[dict[str, Any]] = [
        {},
        {"logit_bias": {300: 5.0}, "min_tokens": 3, "repetition_penalty": 1.5},
        {"allowed_token_ids": (300, 301, 302), "temperature": 1.0, "seed": 3},
        {"logprobs": 1, "speculation": False},
    ]
    scored = [replace(plain, prompt_logprobs=3, **change) for change in changes]
    async with pair(model, other_model, speculation_policy="fixed") as (client, _):
        found = await complete_all(client.address, scored, 2)
        unscored = await complete_all(
            client.address, [replace(each, prompt_logprobs=None) for each in scored], 2
        )
    logprobs = plain_logits(load_reference(tmp_path), prompt).double().log_softmax(dim=-1)
    for each, without in zip(found, unscored, strict=True):
        assert each.token_ids == without.token_ids, "it changes no text"
        assert without.prompt_logprobs == ()
        assert len(each.prompt_logprobs) == len(prompt)
        assert math.isnan(each.prompt_logprobs[0].logprob)
        for row, token_id, position in zip(logprobs, prompt[1:], each.prompt_logprobs[1:], strict=False):
            assert position.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            assert position.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
            assert position.rank == 1 + int((row > row[token_id]).sum())
    assert found[0].speculation.drafted > 0, "the draft still proposes"


async def test_an_echo_is_followed_by_drafted_tokens(model: LoadedModel, other_model: LoadedModel) -> None:
    requests = [
        replace(GREEDY, echo=True),
        replace(GREEDY, echo=True, logprobs=2),
        replace(GREEDY, echo=True, logprobs=1, prompt_logprobs=4, bad_words=("self",)),
    ]
    async with pair(model, other_model, speculation_policy="fixed") as (client, _):
        found = [await client.complete(each) for each in requests]
        alone = [await client.complete(replace(each, speculation=False)) for each in requests]
    for request, each, without in zip(requests, found, alone, strict=True):
        assert each.text.startswith("def f(")
        assert each.token_ids == without.token_ids
        assert each.speculation.drafted > 0
        assert len(each.logprobs) == (0 if request.logprobs is None else len(each.token_ids))


async def test_a_long_prompt_is_shortened_where_the_request_says_so() -> None:
    prompt = tuple(range(10, 110))
    async with cluster(FakeTarget(), FakeDraft()) as client:
        for count, side, last, kept in (
            (5, TruncationSide.LEFT, 109, 5),
            (5, TruncationSide.RIGHT, 14, 5),
            (-1, TruncationSide.LEFT, 109, 63),
            (63, TruncationSide.RIGHT, 72, 63),
        ):
            request = GenerationRequest(
                prompt, max_tokens=1, temperature=0.0, truncate_prompt_tokens=count, truncation_side=side
            )
            found = await complete(client, request)
            assert (found.token_ids, found.summary.prompt_tokens) == ((last + 1,), kept)
        whole = GenerationRequest((10, 11), max_tokens=1, temperature=0.0, truncate_prompt_tokens=5)
        assert (await complete(client, whole)).summary.prompt_tokens == 2


# ---- when a request is served


async def test_of_waiting_requests_the_lowest_priority_goes_first() -> None:
    target = paced(0.02)
    ended: list[int] = []
    async with fleet(target, max_concurrent_requests=1) as (client, _, service):

        async def run(priority: int) -> None:
            await complete(client, GenerationRequest((10,), max_tokens=2, priority=priority))
            ended.append(priority)

        first = asyncio.create_task(run(9))
        await until(lambda: service.completions.admission.running == 1)
        rest = [asyncio.create_task(run(priority)) for priority in (5, 0, 3, -2)]
        await until(lambda: service.completions.admission.queued == 4)
        await asyncio.gather(first, *rest)
    assert ended == [9, -2, 0, 3, 5]

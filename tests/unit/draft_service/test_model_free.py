"""Drafting without a model: lookups agree with plain searches, trees forget, options are checked, text repeats."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.config.settings import load_settings
from tandem.config.speculative import DraftingOptions, LookupMatch
from tandem.drafting.ngram import NgramIndex
from tandem.drafting.repeats import Odds, Repeats
from tandem.drafting.tokens import TokenIndex, TokenState
from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.model.types import Delta, DraftOptions, ProposeStep, RowKind, SamplingParams
from tandem_draft.proposers.model_free import ModelFreeSequence
from tandem_draft.proposers.ngram import ngram_proposer
from tandem_draft.proposers.suffix import ResponseCache, SuffixIndex, SuffixTree, suffix_proposer
from tandem_draft.service import DraftService
from tandem_draft.settings import DraftSettings
from tests.end_to_end.processes import run
from tests.paths import DEMO_EAGLE3

OPTIONS = DraftOptions("a request", SamplingParams(), scope="a scope", row_kind=RowKind.SUPPORT)


async def proposal(
    sequence: ModelFreeSequence, base_length: int, token_ids: Sequence[int], token_count: int
) -> tuple[int, ...]:
    found = await sequence.propose(ProposeStep(Delta(base_length, token_ids), token_count))
    assert found.base_length == base_length + len(token_ids)
    assert not found.distributions, "what was there before is a deterministic proposal"
    return found.token_ids


IndexT = TypeVar("IndexT", bound=TokenIndex)
# Few different tokens, so that they repeat; and runs of a period, as code and tables have them.
tokens = st.one_of(
    st.lists(st.integers(0, 2), max_size=12),
    st.builds(
        lambda period, times: period * times,
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        st.integers(1, 5),
    ),
)
scripts = st.lists(st.tuples(st.integers(0, 10), tokens), min_size=1, max_size=8)
"""For each delta, how many of the present tokens it sends again or replaces, and what it sends."""


class Held(Generic[IndexT]):
    """An index and its tokens, changed as a sequence changes them."""

    def __init__(self, new_index: Callable[[TokenState], IndexT]) -> None:
        self.state = TokenState(0)
        self.index = new_index(self.state)

    @property
    def tokens(self) -> list[int]:
        return list(self.state.token_ids)

    def apply(self, delta: Delta) -> None:
        kept = self.state.kept_length(delta)
        if kept < len(self.state):
            self.index.forget(kept)
        self.state.apply(delta, kept)
        for _ in self.index.learn():
            pass

    def propose(self, token_count: int) -> list[int]:
        return list(self.index.propose(token_count))

    def finish(self) -> None:
        for _ in self.index.finish():
            pass


def script_to_deltas(script: Sequence[tuple[int, Sequence[int]]]) -> list[Delta]:
    """The deltas of a script."""
    length = 0
    deltas = []
    for back, token_ids in script:
        delta = Delta(max(0, length - back), token_ids)
        length = delta.length
        deltas.append(delta)
    return deltas


Window = tuple[int, ...]
all_options = st.builds(
    DraftingOptions,
    suffix_decoding_max_tree_depth=st.integers(1, 8),
    suffix_decoding_max_cached_requests=st.integers(0, 3),
    suffix_decoding_max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    suffix_decoding_min_token_prob=st.sampled_from([0.0, 0.1, 0.4, 0.5, 1.0]),
)


def node_count(tree: SuffixTree) -> int:
    """Number of nodes without the root."""
    pending = [tree.root]
    count = 0
    while pending:
        children = list((pending.pop().children or {}).values())
        count += len(children)
        pending += children
    return count


def counted_windows(tokens: Sequence[int], depth: int) -> list[Window]:
    """The windows of a text that still grows: up to the first that only repeats the beginning of an earlier one."""
    for start in range(len(tokens)):
        end = tuple(tokens[start:])
        if len(end) < depth and any(tuple(tokens[i : i + len(end)]) == end for i in range(start)):
            return [tuple(tokens[i : i + depth]) for i in range(start)]
    return [tuple(tokens[i : i + depth]) for i in range(len(tokens))]


def continued(
    windows: Sequence[Window], context: Window, limit: int, min_prob: float
) -> tuple[list[int], float]:
    """The most frequent token again and again; the one that was seen last among equals."""
    found: list[int] = []
    prob = 1.0
    score = 0.0
    while len(found) < limit:
        path = (*context, *found)
        following = [w[len(path)] for w in windows if w[: len(path)] == path and len(w) > len(path)]
        if not following:
            break
        last_seen = {token_id: i for i, token_id in enumerate(following)}
        token_id = max(last_seen, key=lambda t: (following.count(t), last_seen[t]))
        prob *= following.count(token_id) / len(following)
        if prob < min_prob:
            break
        found.append(token_id)
        score += prob
    return found, score


def best(
    windows: Sequence[Window], tokens: Sequence[int], token_count: int, options: DraftingOptions
) -> tuple[list[int], float]:
    """Over all lengths of match, the continuation with the highest score; the longest match among equals."""
    chosen: tuple[list[int], float] = ([], 0.0)
    for length in range(1, min(len(tokens), options.suffix_decoding_max_tree_depth - 1) + 1):
        limit = min(token_count, int(options.suffix_decoding_max_spec_factor * length))
        found = continued(windows, tuple(tokens[-length:]), limit, options.suffix_decoding_min_token_prob)
        if found[1] >= chosen[1]:
            chosen = found
    return chosen


def proposed(
    responses: Sequence[Sequence[int]], tokens: Sequence[int], token_count: int, options: DraftingOptions
) -> list[int]:
    """The rule in its simplest form."""
    depth = options.suffix_decoding_max_tree_depth
    kept = responses[len(responses) - min(len(responses), options.suffix_decoding_max_cached_requests) :]
    shared = [tuple(response[i : i + depth]) for response in kept for i in range(len(response))]
    own, others = (
        best(windows, tokens, token_count, options) for windows in (counted_windows(tokens, depth), shared)
    )
    return own[0] if own[1] >= others[1] else others[0]


SCOPE = "a scope"


def new_cache(options: DraftingOptions) -> ResponseCache:
    return ResponseCache(options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_cached_requests)


def hold(responses: ResponseCache, options: DraftingOptions) -> Held[SuffixIndex]:
    return Held(partial(SuffixIndex, responses=responses, options=options, scope=SCOPE))


def add(responses: ResponseCache, response: Sequence[int], scope: str = SCOPE) -> None:
    for _ in responses.add(scope, array("i", response)):
        pass


@given(st.lists(scripts, min_size=2, max_size=6), all_options, st.integers(0, 6))
def test_it_learns_from_the_last_responses(
    completions: list[list[tuple[int, list[int]]]], options: DraftingOptions, token_count: int
) -> None:
    cache = new_cache(options)
    responses = list[list[int]]()
    for script in completions:
        held = hold(cache, options)
        first, *rest = script_to_deltas(script)
        held.apply(first)
        for delta in rest:
            held.apply(delta)
            assert held.propose(token_count) == proposed(responses, held.tokens, token_count, options)
        held.finish()
        if response := held.tokens[first.length :]:
            responses.append(response)
        assert len(cache) == min(len(responses), options.suffix_decoding_max_cached_requests)


# A node that learnt its most recent window before its children had: found by chance, kept on purpose.
@example([(0, [0, 0, 1, 0, 0, 0, 0]), (3, [])], 3)
@given(scripts, st.integers(1, 8))
def test_forgetting_everything_leaves_an_empty_tree(script: list[tuple[int, list[int]]], depth: int) -> None:
    options = DraftingOptions(suffix_decoding_max_tree_depth=depth)
    held = hold(new_cache(options), options)
    for delta in script_to_deltas(script):
        held.apply(delta)
        assert node_count(held.index._tree) <= 2 * len(held.tokens)
    held.apply(Delta(0, []))
    held.index.forget(0)
    assert node_count(held.index._tree) == 0


def test_forgetting_responses_frees_their_memory() -> None:
    cache = ResponseCache(24, 2)
    size = 500
    state = 1
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(6):
            add(cache, [state := state * 48271 % 2147483647 for _ in range(size)])
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    tree = cache.tree(SCOPE)
    assert tree is not None
    assert len(tree.texts) == 2
    assert node_count(tree) <= 2 * 2 * size
    assert sizes[1] < 500 * 2 * size, "the documented memory"
    assert max(sizes[2:]) < 1.3 * sizes[1], "four responses came after the two that it may hold"


def test_ten_thousand_scopes_hold_no_more_than_one() -> None:
    """The bound is on the responses of all scopes together, and the oldest go first, whose ever they are."""
    most = 100
    cache = ResponseCache(24, most)
    scopes = [f"scope {index}" for index in range(10_000)]
    for index, scope in enumerate(scopes):
        add(cache, [index, index + 1, index + 2], scope)
        assert len(cache) <= most
    trees = [tree for scope in scopes if (tree := cache.tree(scope)) is not None]
    assert sum(len(tree.texts) for tree in trees) == most
    assert [scope for scope in scopes if cache.tree(scope) is not None] == scopes[-most:]
    for index in range(most):
        add(cache, [index], "one scope")
    assert [scope for scope in scopes if cache.tree(scope) is not None] == []
    assert len(cache) == most


async def test_sequences_learn_from_those_of_their_scope_alone() -> None:
    proposer = suffix_proposer(DraftSettings())
    proposed = []
    for scope in ("first", "second", "first", "", ""):
        async with proposer.sequence(replace(OPTIONS, scope=scope)) as sequence:
            proposed.append(await proposal(sequence, 0, [4, 5], 4))
        async with proposer.sequence(replace(OPTIONS, scope=scope)) as finished:
            await proposal(finished, 0, [1, 2, 3], 0)
            await proposal(finished, 3, [4, 5, 6, 7], 0)
    assert proposed == [(), (), (6, 7), (), ()]


async def test_sequences_learn_from_those_that_finished() -> None:
    proposer = suffix_proposer(DraftSettings())
    with suppress(ConnectionError):
        async with proposer.sequence(OPTIONS) as dropped:
            await proposal(dropped, 0, [1, 2, 3], 0)
            await proposal(dropped, 3, [14, 15, 16, 17], 4)
            raise ConnectionError
    async with proposer.sequence(OPTIONS) as finished:
        await proposal(finished, 0, [1, 2, 3], 0)
        assert await proposal(finished, 3, [4, 5, 6, 7], 4) == ()
        assert await proposal(finished, 7, [4, 5], 4) == (6, 7)
        assert await proposal(finished, 7, [], 4) == (), "the two are taken back"
    async with proposer.sequence(OPTIONS) as sequence:
        assert await proposal(sequence, 0, [4, 5], 4) == (6, 7)
        assert await proposal(sequence, 0, [14, 15], 4) == (), "it was dropped, not finished"


def lookup(smallest: int = 5, largest: int = 5, match: LookupMatch = "latest") -> DraftingOptions:
    return DraftingOptions(prompt_lookup_min=smallest, prompt_lookup_max=largest, prompt_lookup_match=match)


def searched(tokens: Sequence[int], options: DraftingOptions, token_count: int) -> list[int]:
    """The rule in its simplest form."""
    for size in range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1):
        starts = [
            i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[len(tokens) - size :]
        ]
        if starts:
            start = starts[0] if options.prompt_lookup_match == "earliest" else starts[-1]
            return list(tokens[start + size : start + size + token_count])
    return []


@given(
    scripts, st.integers(1, 4), st.integers(0, 3), st.sampled_from(["latest", "earliest"]), st.integers(0, 6)
)
def test_the_index_agrees_with_a_search(
    script: list[tuple[int, list[int]]], smallest: int, more: int, match: LookupMatch, token_count: int
) -> None:
    options = lookup(smallest, smallest + more, match)
    held = Held(partial(NgramIndex, options=options))
    for delta in script_to_deltas(script):
        held.apply(delta)
        assert held.propose(token_count) == searched(held.tokens, options, token_count)


def test_memory_is_as_documented() -> None:
    held = Held(partial(NgramIndex, options=lookup()))
    state = 1
    tokens = [state := state * 48271 % 2147483647 for _ in range(20_000)]
    tracemalloc.start()
    try:
        held.apply(Delta(0, tokens))
        assert tracemalloc.get_traced_memory()[0] < 200 * len(tokens)
        held.apply(Delta(0, tokens[:1]))
        assert not held.index._largest_first[0]._ends
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("base_length", "token_ids", "sentence"),
    [
        (
            1,
            [1],
            "the delta starts at token 1, but the sequence has 0 tokens; send the missing ones from base_length 0",
        ),
        (0, [1] * 9, "the sequence would have 9 tokens, but its limit is 8"),
        (0, [1, -2], "token id -2 is out of range; ids must be in 0..2147483647"),
    ],
)
async def test_a_delta_that_does_not_fit_is_refused(
    base_length: int, token_ids: list[int], sentence: str
) -> None:
    proposer = ngram_proposer(DraftSettings())
    async with proposer.sequence(replace(OPTIONS, max_length=8)) as drafted:
        with pytest.raises(InvalidRequestError) as refusal:
            await proposal(drafted, base_length, token_ids, 1)
    assert str(refusal.value) == sentence


async def test_a_sequence_that_may_become_too_long_is_refused() -> None:
    proposer = ngram_proposer(DraftSettings(max_length=8))
    with pytest.raises(InvalidRequestError, match="9 tokens was asked for; this service takes up to 8"):
        async with proposer.sequence(replace(OPTIONS, max_length=9)):
            pass


def test_the_service_starts_without_torch() -> None:
    script = (
        "import sys\n"
        "from tandem_draft.service import DraftService\n"
        "from tandem_draft.settings import DraftSettings\n"
        "for method in ('ngram', 'suffix'):\n"
        "    info = DraftService(DraftSettings(method=method)).load()[0].model_info\n"
        "    assert (info.name, info.architecture, info.vocabulary_size) == (method, method, 0)\n"
        "    assert (info.tokenizer_hash, info.max_length) == ('', 0)\n"
        "assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()\n"
    )
    ran = run(sys.executable, "-c", script)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is missing; give it, or set TANDEM_DRAFT_MODEL"),
        (["--method", "eagle3", "--model", "head"],
            "speculative_method is eagle3, which reads the target's hidden states and runs in its process"),
        (["--model", str(DEMO_EAGLE3)], "speculative_method is eagle3, which reads the target's hidden states"),
        (["--method", "ngram", "--prompt-lookup-min", "0"], "prompt_lookup_min is 0; it must be at least 1"),
        (["--method", "suffix", "--suffix-decoding-min-token-prob", "2"],
            "suffix_decoding_min_token_prob is 2; it must be between 0 and 1"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_before_loading(arguments: Sequence[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        DraftService(load_settings(DraftSettings, arguments, "draft"))
    assert sentence in str(refusal.value)


PROMPT = (1, 2, 3, 4, 5, 6, 1, 2)


class Text:
    """A sequence that is proposed for and written on."""

    def __init__(self, odds: Odds, prompt: Sequence[int] = PROMPT) -> None:
        self._tokens = TokenState(4096)
        self.repeats = Repeats(self._tokens, odds)
        self.write(*prompt)

    def write(self, *token_ids: int, base: int | None = None) -> None:
        delta = Delta(len(self._tokens) if base is None else base, token_ids)
        kept = self._tokens.kept_length(delta)
        if kept < len(self._tokens):
            self.repeats.forget(kept)
        self._tokens.apply(delta, kept)


def repeated_of(odds: Odds, *, repeats_right: bool, head_right: int) -> list[bool]:
    """Which of 2,000 proposals were repeated, where the head foresees so many tokens and repeats all or none."""
    found = []
    for _ in range(2000):
        text = Text(odds)
        repeated = text.repeats.propose(4)
        found.append(bool(repeated))
        own = (7, 7, 7, 7)
        if not repeated:
            text.repeats.note(own)
        right = (4 if repeats_right else 0) if repeated else head_right
        text.write(*(repeated or own)[:right], 99)
        text.repeats.propose(0)
    return found


def test_what_followed_before_is_proposed_and_nothing_where_nothing_did() -> None:
    text = Text(Odds())
    assert text.repeats.propose(3) == (3, 4, 5)
    text.write(3, 9)
    assert text.repeats.propose(3) == ()


def test_tokens_that_were_taken_back_are_not_repeated() -> None:
    text = Text(Odds(), (1, 2, 3, 1, 2, 4, 1, 2))
    assert text.repeats.propose(1) == (4,)
    text.write(5, 1, 2, base=5)
    assert text.repeats.propose(1) == (5,)


def test_the_better_of_both_ways_is_taken() -> None:
    assert all(repeated_of(Odds(), repeats_right=True, head_right=2))
    odds = Odds()
    first = repeated_of(odds, repeats_right=False, head_right=2)
    assert first[0], "it was tried"
    later = repeated_of(odds, repeats_right=False, head_right=2)
    assert 0 < sum(later) < 0.1 * len(later), "it is tried again now and then"
    repeated_of(odds, repeats_right=True, head_right=0)
    assert all((repeated_of(odds, repeats_right=True, head_right=0))[-100:]), "the text has changed"

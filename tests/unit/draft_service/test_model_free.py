"""Drafting without a model: lookups agree with plain searches, suffix trees forget, and options are checked."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Generic, TypeVar

import grpc.aio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draft_service.proposers import Proposer
from draft_service.proposers.model_free import ModelFreeProposer, SequenceLimits, TokenIndex, TokenState
from draft_service.proposers.ngram import NgramIndex, ngram_proposer
from draft_service.proposers.suffix import ResponseCache, SuffixIndex, SuffixTree, suffix_proposer
from draft_service.service import DraftService
from draft_service.servicer import DraftServicer
from draft_service.settings import DraftSettings
from tandem.config.speculative import DraftingOptions, LookupMatch
from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.rpc.channels import failure
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import new_server
from tandem.settings import ServerSettings, load_settings
from tandem.types import Delta, DraftOptions, Finish, Proposal, ProposeStep, RowKind, SamplingParams
from tandem.v1.draft_pb2 import ProposeResponse
from tandem.v1.draft_pb2_grpc import DraftServiceStub, add_DraftServiceServicer_to_server
from tandem.wire import draft as wire
from tandem.wire.status import Ending
from tests.paths import DEMO_EAGLE3, ROOT


@asynccontextmanager
async def served(proposer: Proposer) -> AsyncIterator[DraftServiceStub]:
    """A stub of a server in this process."""
    servicer = DraftServicer()
    servicer.proposer = proposer
    server = new_server(ServerSettings(), RunningCalls())
    add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await proposer.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield DraftServiceStub(channel)
    finally:
        await server.stop(None)
        await proposer.close()


class Stream:
    """One sequence."""

    def __init__(self, stub: DraftServiceStub) -> None:
        self.call = stub.Propose()

    async def say(self, request: wire.Request) -> None:
        # As coordinators do: when the service has refused the opening already, reading says why.
        with suppress(asyncio.InvalidStateError):
            await self.call.write(wire.requests_to_proto([(1, request)]))

    async def answer(self) -> Proposal:
        """The next answer.

        Raises:
            TandemError: the sequence has ended.
        """
        response = await self.call.read()
        assert isinstance(response, ProposeResponse)
        ((_, answer),) = wire.answers_from_proto(response)
        if isinstance(answer, Ending):
            raise failure("draft service", answer)
        assert isinstance(answer, Proposal)
        return answer

    async def propose(self, base_length: int, token_ids: Sequence[int], token_count: int) -> Proposal:
        await self.say(ProposeStep(Delta(base_length, token_ids), token_count))
        return await self.answer()

    async def finish(self) -> None:
        await self.say(Finish(0))
        response = await self.call.read()
        assert isinstance(response, ProposeResponse)
        assert [end.code for end in response.ends] == [0]


@asynccontextmanager
async def opened(
    stub: DraftServiceStub, max_length: int = 0, row_kind: RowKind = RowKind.TOKEN
) -> AsyncIterator[Stream]:
    """A sequence that is dropped at the end unless it was finished."""
    stream = Stream(stub)
    try:
        await stream.say(
            DraftOptions("a request", SamplingParams(), max_length=max_length, row_kind=row_kind)
        )
        yield stream
    finally:
        stream.call.cancel()


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

    def __init__(self, new_index: Callable[[TokenState], IndexT], max_length: int = 0) -> None:
        self.state = TokenState(max_length)
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
    length, deltas = 0, []
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
    pending, count = [tree.root], 0
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
    prob, score = 1.0, 0.0
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


def new_cache(options: DraftingOptions) -> ResponseCache:
    return ResponseCache(options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_cached_requests)


def hold(responses: ResponseCache, options: DraftingOptions) -> Held[SuffixIndex]:
    return Held(partial(SuffixIndex, responses=responses, options=options))


def add(responses: ResponseCache, response: Sequence[int]) -> None:
    for _ in responses.add(array("i", response)):
        pass


@settings(deadline=None)
@given(scripts, all_options, st.integers(0, 6))
def test_proposals_agree_with_counting_all_windows(
    script: list[tuple[int, list[int]]], options: DraftingOptions, token_count: int
) -> None:
    held = hold(new_cache(options), options)
    for delta in script_to_deltas(script):
        held.apply(delta)
        assert held.propose(token_count) == proposed([], held.tokens, token_count, options)


@settings(deadline=None)
@given(st.lists(scripts, min_size=2, max_size=6), all_options, st.integers(0, 6))
def test_it_learns_from_the_last_responses(
    completions: list[list[tuple[int, list[int]]]], options: DraftingOptions, token_count: int
) -> None:
    cache, responses = new_cache(options), list[list[int]]()
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
@settings(deadline=None)
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
    cache, size, state = ResponseCache(24, 2), 500, 1
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(6):
            add(cache, [state := state * 48271 % 2147483647 for _ in range(size)])
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(cache.tree.texts) == 2
    assert node_count(cache.tree) <= 2 * 2 * size
    assert sizes[1] < 500 * 2 * size, "the documented memory"
    assert max(sizes[2:]) < 1.3 * sizes[1], "four responses came after the two that it may hold"


async def test_sequences_through_the_servicer_learn_from_those_that_finished() -> None:
    async with served(suffix_proposer(DraftingOptions(), SequenceLimits())) as stub:
        async with opened(stub, row_kind=RowKind.SUPPORT) as finished, opened(stub) as dropped:
            for stream, response in ((finished, [4, 5, 6, 7]), (dropped, [14, 15, 16, 17])):
                await stream.propose(0, [1, 2, 3], 0)
                assert (await stream.propose(3, response, 4)).token_ids == ()
            own = await finished.propose(7, [4, 5], 4)
            assert (own.base_length, own.token_ids, own.distributions) == (9, (6, 7), ())
            assert (await finished.propose(7, [], 4)).token_ids == (), "the two are taken back"
            await finished.finish()
        async with opened(stub) as stream:
            assert (await stream.propose(0, [4, 5], 4)).token_ids == (6, 7)
            assert (await stream.propose(0, [14, 15], 4)).token_ids == (), "it was dropped, not finished"


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


@settings(deadline=None)
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


async def test_a_sequence_through_the_servicer() -> None:
    proposer = ngram_proposer(lookup(2, 3), SequenceLimits())
    async with served(proposer) as stub, opened(stub, row_kind=RowKind.SUPPORT) as stream:
        nothing = await stream.propose(0, [1, 2, 3, 4], 0)
        assert (nothing.base_length, nothing.token_ids) == (4, ())
        proposal = await stream.propose(4, [1, 2], 4)
        assert (proposal.base_length, proposal.token_ids) == (6, (3, 4, 1, 2))
        assert not proposal.distributions, "a lookup is a deterministic proposal"
        assert (await stream.propose(4, [1, 2], 4)).token_ids == (3, 4, 1, 2), (
            "a repeated step changes nothing"
        )
        assert (await stream.propose(5, [9], 4)).token_ids == ()
        assert (await stream.propose(0, [7, 8, 9, 7, 8], 1)).token_ids == (9,), "a failover sends everything"
        await stream.finish()


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
    async with served(ngram_proposer(lookup(), SequenceLimits())) as stub, opened(stub, 8) as stream:
        with pytest.raises(InvalidRequestError) as refusal:
            await stream.propose(base_length, token_ids, 1)
    assert str(refusal.value) == f"draft service: {sentence}"


async def test_a_sequence_that_may_become_too_long_is_refused() -> None:
    proposer = ngram_proposer(lookup(), SequenceLimits(max_length=8))
    async with served(proposer) as stub, opened(stub, 9) as stream:
        with pytest.raises(InvalidRequestError, match="9 tokens was asked for; this service takes up to 8"):
            # Write nothing more: a write that fails at the same moment would hide the refusal.
            await stream.answer()


def test_the_service_starts_without_torch() -> None:
    script = (
        "import sys\n"
        "from draft_service.service import DraftService\n"
        "from draft_service.settings import DraftSettings\n"
        "for method in ('ngram', 'suffix'):\n"
        "    info = DraftService(DraftSettings(method=method)).load()[0].model_info\n"
        "    assert (info.architecture, info.vocabulary_size, info.max_length) == (method, 0, 0)\n"
        "assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def draft_settings(*arguments: str) -> DraftSettings:
    return load_settings(DraftSettings, arguments, "draft")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is missing; give it, or set TANDEM_DRAFT_MODEL"),
        (
            ["--method", "eagle3", "--model", "head"],
            "speculative_method is eagle3, which reads the target's hidden states and runs in its process",
        ),
        (
            ["--model", str(DEMO_EAGLE3)],
            "speculative_method is eagle3, which reads the target's hidden states",
        ),
        (["--method", "ngram", "--prompt-lookup-min", "0"], "prompt_lookup_min is 0; it must be at least 1"),
        (
            ["--method", "suffix", "--suffix-decoding-min-token-prob", "2"],
            "suffix_decoding_min_token_prob is 2; it must be between 0 and 1",
        ),
    ],
)
def test_invalid_options_are_refused_before_anything_is_loaded(
    arguments: Sequence[str], sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        DraftService(draft_settings(*arguments))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_without_a_model_there_is_nothing_to_compare_with_the_targets(method: str) -> None:
    info = chosen_proposer(method, SequenceLimits()).model_info
    assert (info.name, info.architecture) == (method, method)
    assert (info.vocabulary_size, info.tokenizer_hash, info.max_length) == (0, "", 0)


def chosen_proposer(method: str, limits: SequenceLimits) -> ModelFreeProposer:
    return (
        ngram_proposer(DraftingOptions(), limits)
        if method == "ngram"
        else suffix_proposer(DraftingOptions(), limits)
    )

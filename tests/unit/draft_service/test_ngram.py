"""Prompt lookup finds the same as a search through the whole sequence, after any deltas."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.proposers.model_free import SequenceLimits
from draft_service.proposers.ngram import NgramIndex, ngram_proposer
from tandem.config.speculative import DraftingOptions, LookupMatch
from tandem.errors import InvalidRequestError
from tandem.types import Delta, RowKind
from tests.paths import ROOT
from tests.unit.draft_service.deltas import Held, script_to_deltas, scripts
from tests.unit.draft_service.served import opened, served


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


@pytest.mark.parametrize(
    ("tokens", "smallest", "largest", "match", "proposed"),
    [
        pytest.param([1, 2, 3, 9, 1, 2, 3], 1, 3, "latest", [9, 1, 2, 3], id="what followed is proposed"),
        pytest.param([1, 2, 3, 9, 1, 2, 3], 4, 5, "latest", [], id="no n-gram of that size occurred before"),
        pytest.param([1, 7, 1, 8, 1], 1, 1, "latest", [8, 1], id="the most recent occurrence wins"),
        pytest.param([1, 7, 1, 8, 1], 1, 1, "earliest", [7, 1, 8, 1], id="the earliest, as vLLM on a CPU"),
        pytest.param(
            [1, 2, 7, 9, 2, 8, 1, 2], 1, 2, "latest", [7, 9, 2, 8, 1], id="longer before more recent"
        ),
        pytest.param([4, 4, 4], 1, 2, "latest", [4], id="occurrences may overlap"),
        pytest.param([4, 4, 4, 4], 1, 2, "earliest", [4, 4], id="overlap and earliest"),
        pytest.param([3], 1, 5, "latest", [], id="one token"),
        pytest.param([], 1, 5, "latest", [], id="no token"),
    ],
)
def test_lookup_finds_the_expected_continuations(
    tokens: list[int], smallest: int, largest: int, match: LookupMatch, proposed: list[int]
) -> None:
    held = Held(partial(NgramIndex, options=lookup(smallest, largest, match)))
    held.apply(Delta(0, tokens))
    assert held.propose(5) == proposed


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

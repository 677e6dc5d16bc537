"""Which outcomes are drafted for; their tokens are those that the draft would propose after them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.drafting.proposal import propose_head
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.rows import TORCH_SAMPLER
from tandem.errors import InvalidRequestError
from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    AheadBudget,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
)
from tandem.wire.draft import answers_to_proto
from tandem_draft.proposers import DraftedSequence, ahead
from tandem_draft.proposers.ahead import OutcomeHistory, Ranking, rank
from tandem_draft.proposers.mapping import Vocabularies
from tandem_draft.proposers.sequence import StandaloneSequence
from tandem_draft.proposers.standalone import StandaloneProposer
from tests.paths import DEVICE
from tests.service.clients import until
from tests.unit.engine.greedy import running
from tests.unit.engine.tiny_models import CONFIGS, MAX_LENGTH, VOCABULARY_SIZE, save_checkpoint

SECONDS = 20.0
PROMPT = (5, 17, 80, 3, 44)
K = 4
BUDGET = AheadBudget(branch_count=12, token_count=K)
GREEDY = DraftOptions(
    "r", SamplingParams(temperature=0.0), scope="a scope", ahead=BUDGET, row_kind=RowKind.TOKEN
)
STRICT = replace(GREEDY, sampling=SamplingParams(1.0, seed=3))
SUPPORT = replace(GREEDY, sampling=SamplingParams(0.9, seed=4), row_kind=RowKind.SUPPORT)
PENALIZED = replace(
    GREEDY,
    sampling=SamplingParams(0.0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5),
    prompt_length=len(PROMPT),
)
MakeModel = Callable[[str], LoadedModel]
_FEW_BYTES = 40_000


@asynccontextmanager
async def proposing(
    model: Any,
    draft_top_k: int = 8,
    *,
    head: Any = propose_head,
    vocabularies: Vocabularies | None = None,
    **limits: Any,
) -> AsyncIterator[StandaloneProposer]:
    """A proposer over an engine of its own, which runs a model or a runner of one."""
    async with running(model, head, **{"max_sequences": 3, **limits}) as engine, asyncio.timeout(60.0):
        yield StandaloneProposer(engine, draft_top_k, vocabularies=vocabularies)


@dataclass(frozen=True)
class Round:
    """All outcomes that were pushed for one verification."""

    columns: tuple[DraftedOutcomes, ...]

    @property
    def outcomes(self) -> list[tuple[int, int]]:
        first = self.columns[0]
        return list(zip(first.accepted_counts, first.next_token_ids, strict=True))

    def tokens(self, rank: int) -> tuple[int, ...]:
        """The tokens drafted after an outcome, up to where it ended."""
        own = (column.token_ids[rank] for column in self.columns if rank < len(column.token_ids))
        return tuple(token_id for token_id in own if token_id >= 0)

    def distributions(self, rank: int) -> list[SparseDistribution]:
        return [column.distributions[rank] for column in self.columns if rank < len(column.distributions)]


def queue_of(sequence: DraftedSequence) -> asyncio.Queue[DraftedOutcomes | Exception]:
    assert sequence.pushed is not None
    return sequence.pushed


async def outcomes_of(sequence: DraftedSequence) -> DraftedOutcomes:
    """The next ones that are pushed."""
    found = await queue_of(sequence).get()
    assert isinstance(found, DraftedOutcomes)
    return found


async def pushed(sequence: DraftedSequence, depths: int = K) -> Round:
    columns = []
    for depth in range(depths):
        column = await outcomes_of(sequence)
        assert column.depth == depth
        columns.append(column)
    return Round(tuple(columns))


async def proposed(sequence: DraftedSequence, step: ProposeStep) -> Proposal:
    proposal = await sequence.propose(step)
    assert proposal is not None
    return proposal


async def assert_as_if_asked(
    proposer: StandaloneProposer,
    options: DraftOptions,
    before: tuple[int, ...],
    drafted: Round,
    *,
    count: int = K,
    ranks: Sequence[int] | None = None,
    may_be_shorter: bool = False,
) -> None:
    """The continuations of these outcomes, or of all, equal what a sequence without drafting ahead proposes after them,
    or begin so: `count` tokens of those before were proposed."""
    async with proposer.sequence(replace(options, ahead=None)) as plain:
        for rank in range(len(drafted.outcomes)) if ranks is None else ranks:
            accepted, token_id = drafted.outcomes[rank]
            tokens = (*before[: len(before) - count + accepted], token_id)
            fresh = await proposed(plain, ProposeStep(Delta(0, tokens), K))
            own_ids = drafted.tokens(rank)
            assert own_ids == (fresh.token_ids[: len(own_ids)] if may_be_shorter else fresh.token_ids)
            assert len(drafted.distributions(rank)) == len(fresh.distributions)
            for own, other in zip(drafted.distributions(rank), fresh.distributions, strict=True):
                assert isinstance(other, SparseDistribution)
                np.testing.assert_array_equal(own.token_ids, other.token_ids)
                np.testing.assert_allclose(own.probs, other.probs, atol=1e-5)
            if rank == 0:
                lead = drafted.columns[0].lead_token_ids
                assert lead == fresh.token_ids[1 : 1 + len(lead)] or may_be_shorter


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", GREEDY, id="greedy"),
        pytest.param("llama", STRICT, id="strict"),
        pytest.param("llama", SUPPORT, id="support"),
        pytest.param("llama", PENALIZED, id="greedy, penalties"),
        pytest.param("gpt2", SUPPORT, id="support, learned positions"),
        pytest.param("gpt2", STRICT, id="strict, learned positions"),
    ],
)
async def test_each_continuation_is_what_would_be_proposed(
    make_model: MakeModel, family: str, options: DraftOptions
) -> None:
    """After an answer; after hits, each of which goes on with a branch of the one before, where a lead shortens the way
    of the first outcome; and after a miss."""
    leads = 0
    async with proposing(make_model(family)) as proposer, proposer.sequence(options) as sequence:
        history = proposer.histories[
            options.row_kind, options.sampling.is_greedy, False, False
        ].accepted_shares
        history.rates = [0.99] * len(history.rates)  # as a draft that is nearly always right
        first = await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, BUDGET))
        before = (*PROMPT, *first.token_ids)
        count = K
        is_later = False
        for rank, taken in [(0, 2), (0, 1), (0, 3), (5, K), (0, 2), (3, 1), (0, K), (0, 1)]:
            drafted = await pushed(sequence)
            assert len(drafted.outcomes) == len(set(drafted.outcomes)) == BUDGET.branch_count
            leads += len(drafted.columns[0].lead_token_ids)
            ranks = (0, rank) if is_later else None
            await assert_as_if_asked(proposer, options, before, drafted, count=count, ranks=ranks)
            # A hit: the continuation is verified without a request. What was proposed is there once it is sent back.
            accepted, token_id = drafted.outcomes[rank]
            kept = len(before) - count + accepted
            before = (*before[:kept], token_id, *drafted.tokens(rank)[:taken])
            count = taken
            # The branches are then as long as they become.
            await until(lambda: proposer._engine._background.is_empty, SECONDS)
            base = kept if is_later else len(PROMPT)
            assert await sequence.propose(ProposeStep(Delta(base, before[base:]), 0, BUDGET, taken)) is None
            is_later = True
        # A miss: the draft gets a request, as without drafting ahead.
        await pushed(sequence)
        base = len(before) - count
        other = next(t for t in range(VOCABULARY_SIZE) if t != before[base])
        answer = await proposed(sequence, ProposeStep(Delta(base, (other,)), K, BUDGET))
        async with proposer.sequence(replace(options, ahead=None)) as plain:
            fresh = await proposed(plain, ProposeStep(Delta(0, (*before[:base], other)), K))
        assert answer.token_ids == fresh.token_ids
        before = (*before[:base], other, *answer.token_ids)
        await assert_as_if_asked(proposer, options, before, await pushed(sequence))
    assert bool(leads) == (options.row_kind is RowKind.TOKEN)


async def test_a_request_ends_the_drafting_of_the_previous_round(make_model: MakeModel) -> None:
    """No outcome of it is pushed after the answer."""
    long = AheadBudget(8, 32)
    async with (
        proposing(make_model("llama")) as proposer,
        proposer.sequence(replace(GREEDY, ahead=long)) as sequence,
    ):
        tokens = list(PROMPT)
        for _ in range(5):
            delta = Delta(0, tuple(tokens))
            proposal = await proposed(sequence, ProposeStep(delta, K, long))
            tokens += [*proposal.token_ids, 7]
            column = await outcomes_of(sequence)
            assert (column.base_length, column.depth) == (delta.length, 0)
        await sequence.propose(ProposeStep(Delta(0, tuple(tokens)), K))
        assert queue_of(sequence).empty()


@pytest.mark.parametrize(("room", "depths"), [(K + 2, 2), (K + 1, 1), (K, 0)])
async def test_continuations_end_at_the_last_position(make_model: MakeModel, room: int, depths: int) -> None:
    """The model has learned positions; without a position left, no continuation begins."""
    prompt = tuple(i % VOCABULARY_SIZE for i in range(MAX_LENGTH - room))
    budget = AheadBudget(64, K)
    async with proposing(make_model("gpt2")) as proposer, proposer.sequence(GREEDY) as sequence:
        first = await proposed(sequence, ProposeStep(Delta(0, prompt), K, budget))
        drafted = await pushed(sequence, depths)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue_of(sequence).get(), 0.2)
        if not depths:
            return
        assert K in {accepted for accepted, _ in drafted.outcomes}
        async with proposer.sequence(replace(GREEDY, ahead=None)) as plain:
            for rank in (0, len(drafted.outcomes) - 1):
                accepted, token_id = drafted.outcomes[rank]
                tokens = (*prompt, *first.token_ids[:accepted], token_id)
                fresh = await proposed(plain, ProposeStep(Delta(0, tokens), depths))
                assert drafted.tokens(rank) == fresh.token_ids


async def test_a_step_without_an_answer_that_does_not_fit_ends_the_sequence(make_model: MakeModel) -> None:
    options = replace(GREEDY, max_length=len(PROMPT) + 1)
    async with proposing(make_model("llama")) as proposer, proposer.sequence(options) as sequence:
        assert await sequence.propose(ProposeStep(Delta(0, (*PROMPT, 1, 2)), 0, BUDGET, 2)) is None
        error = await queue_of(sequence).get()
        assert isinstance(error, InvalidRequestError)
        assert "would have 7 tokens, but its limit is 6" in str(error)


@pytest.mark.parametrize(
    "options",
    [
        replace(GREEDY, ahead=None),
        replace(GREEDY, with_token_logits=True),
        replace(GREEDY, max_length=len(PROMPT) + 3),
    ],
    ids=["not opened for it", "token logits", "the longest proposal"],
)
async def test_unpredictable_outcomes_are_not_drafted(make_model: MakeModel, options: DraftOptions) -> None:
    async with proposing(make_model("llama")) as proposer, proposer.sequence(options) as sequence:
        for _ in range(3):
            assert len(await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, BUDGET))) == K
        assert sequence.pushed is None or sequence.pushed.empty()


@pytest.mark.parametrize(("options", "most"), [(SUPPORT, _FEW_BYTES), (STRICT, 650), (GREEDY, 650)])
async def test_a_rounds_messages_are_bounded(
    make_model: MakeModel, options: DraftOptions, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supports of 64 ids for 16 outcomes of 5 tokens are over 40 KB: the last outcomes are given up."""
    monkeypatch.setattr(ahead, "MAX_ROUND_BYTES", _FEW_BYTES)
    budget = AheadBudget(16, 5)
    flat = replace(options, ahead=budget, sampling=replace(options.sampling, temperature=50.0))
    if options is GREEDY:
        flat = replace(GREEDY, ahead=budget)
    async with (
        proposing(make_model("llama"), draft_top_k=64) as proposer,
        proposer.sequence(flat) as sequence,
    ):
        await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, budget))
        drafted = await pushed(sequence, 5)
    size = answers_to_proto([(1, each) for each in drafted.columns]).ByteSize()
    widths = [len(column.token_ids) for column in drafted.columns]
    assert size <= most
    assert widths == sorted(widths, reverse=True)
    if options is SUPPORT:
        assert size > 0.6 * most, "a small id takes one or two bytes, where four are reckoned with"
        assert 16 > widths[-1] > 0


async def test_of_what_nobody_reads_one_round_is_kept(make_model: MakeModel) -> None:
    """However many rounds are granted, as by a coordinator that reads nothing."""
    async with proposing(make_model("llama")) as proposer, proposer.sequence(GREEDY) as sequence:
        for _ in range(12):
            await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, BUDGET))
            await until(lambda: not queue_of(sequence).empty(), SECONDS)
            assert queue_of(sequence).qsize() <= K


async def test_nothing_is_drafted_ahead_of_more_than_a_proposal_may_have(make_model: MakeModel) -> None:
    """Reading it would take a row of logits for each of its tokens, whatever a coordinator says that it proposed."""
    long = tuple(i % VOCABULARY_SIZE for i in range(MAX_AHEAD_TOKENS + 2))
    async with proposing(make_model("llama")) as proposer, proposer.sequence(GREEDY) as sequence:
        for proposed_count, are_drafted in ((MAX_AHEAD_TOKENS + 1, False), (MAX_AHEAD_TOKENS, True)):
            assert await sequence.propose(ProposeStep(Delta(0, long), 0, BUDGET, proposed_count)) is None
            assert isinstance(sequence, StandaloneSequence)
            assert sequence.ahead is not None
            assert (sequence.ahead._round is not None) == are_drafted


async def test_a_released_sequence_is_not_drafted_for(make_model: MakeModel) -> None:
    async with proposing(make_model("llama")) as proposer:
        async with proposer.sequence(replace(GREEDY, ahead=AheadBudget(16, 64))) as sequence:
            await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, AheadBudget(16, 64)))
            await queue_of(sequence).get()
        async with proposer.sequence(GREEDY) as other:
            assert len(await proposed(other, ProposeStep(Delta(0, PROMPT), K))) == K
        await until(lambda: not proposer.kv_usage().sequence_count, SECONDS)
        assert queue_of(sequence).qsize() < 63, "the budget allows more"


PROPOSED = (1, 2)


def ranking(*confidences: float) -> Ranking:
    """Two proposed tokens and the token after them; each row's own token first, and two others."""
    scores = [math.log(0.7), math.log(0.2), math.log(0.1)]
    return Ranking([([1, 11, 12], scores), ([2, 21, 22], scores), ([31, 32, 33], scores)], confidences)


def test_a_confident_draft_ranks_the_whole_proposal_first_and_an_unsure_one_a_rejection() -> None:
    history = OutcomeHistory()
    assert history.likeliest(PROPOSED, ranking(0.99, 0.99), 1) == [(2, 31)]
    assert history.likeliest(PROPOSED, ranking(0.02, 0.99), 1) == [(0, 11)]
    assert history.likeliest(PROPOSED, ranking(0.99, 0.02), 1) == [(1, 21)]


def test_without_a_proposal_only_next_tokens_are_ranked() -> None:
    alone = Ranking([([5, 6], [0.0, -1.0])], ())
    assert OutcomeHistory().likeliest((), alone, 4) == [(0, 5), (0, 6)]


def test_a_token_without_any_probability_is_not_drafted_for() -> None:
    scores = [0.0, -math.inf]
    found = OutcomeHistory().likeliest((1,), Ranking([([1, 11], scores), ([31, 32], scores)], (0.9,)), 9)
    assert found == [(1, 31)]


def test_it_learns_that_confident_tokens_are_rejected() -> None:
    history = OutcomeHistory()
    sure = ranking(0.99, 0.99)
    for _ in range(200):
        history.came(PROPOSED, sure, 0, 12)
    found = history.likeliest(PROPOSED, sure, 9)
    assert found[0] == (0, 12), "the less likely of two, which came each time"
    assert found.index((0, 12)) < found.index((2, 31))


def test_it_learns_that_doubtful_tokens_are_accepted() -> None:
    history = OutcomeHistory()
    unsure = ranking(0.02, 0.02)
    assert history.likeliest(PROPOSED, unsure, 1) == [(0, 11)]
    for _ in range(200):
        history.came(PROPOSED, unsure, 2, 31)
    assert history.likeliest(PROPOSED, unsure, 1) == [(2, 31)]


def test_old_text_is_forgotten() -> None:
    """The counts are bounded: a change of text shows within as many rounds as the one before lasted."""
    history = OutcomeHistory()
    sure = ranking(0.99, 0.99)
    for _ in range(20_000):
        history.came(PROPOSED, sure, 2, 31)
    for _ in range(4_000):
        history.came(PROPOSED, sure, 0, 11)
    assert history.likeliest(PROPOSED, sure, 1) == [(0, 11)]


shares = st.floats(0.0, 1.0)


@st.composite
def rankings(draw: st.DrawFn) -> tuple[tuple[int, ...], Ranking]:
    proposed = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    rows = len(proposed) + 1
    width = draw(st.integers(1, 4))
    ids = [draw(st.permutations(range(10)))[:width] for _ in range(rows)]
    falling = st.lists(st.floats(-20.0, 0.0), min_size=width, max_size=width)
    scores = [sorted(draw(falling), reverse=True) for _ in range(rows)]
    return proposed, Ranking([*zip(ids, scores, strict=True)], [draw(shares) for _ in proposed])


@given(rankings(), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=12), st.integers(0, 20))
def test_the_first_of_many_are_those_of_few_distinct_and_possible(
    case: tuple[tuple[int, ...], Ranking], came: list[tuple[int, int]], count: int
) -> None:
    proposed, own = case
    history = OutcomeHistory()
    for accepted, token_id in came:
        history.came(proposed, own, min(accepted, len(proposed)), token_id)
    everything = history.likeliest(proposed, own, 999)
    assert history.likeliest(proposed, own, count) == everything[:count]
    assert len(set(everything)) == len(everything)
    for accepted, token_id in everything:
        assert token_id in own.rows[accepted][0]
        assert accepted == len(proposed) or token_id != proposed[accepted]
    for accepted in range(len(proposed) + 1):
        places = [own.rows[accepted][0].index(t) for a, t in everything if a == accepted]
        if not came:
            assert places == sorted(places), "at first a row's candidates come in their own order"


async def test_a_sequence_may_ask_for_narrower_distributions(make_model: MakeModel) -> None:
    """Those of its proposals and of what is drafted ahead."""
    sizes = []
    async with proposing(make_model("llama"), draft_top_k=64) as proposer:
        for mass in (0.0, 0.5):
            async with proposer.sequence(replace(SUPPORT, draft_support_mass=mass)) as sequence:
                answer = await proposed(sequence, ProposeStep(Delta(0, PROMPT), K, BUDGET))
                drafted = await pushed(sequence)
            found = [
                *answer.distributions,
                *(each for column in drafted.columns for each in column.distributions),
            ]
            sizes.append(max(len(each.token_ids) for each in found))
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("seed", range(3))
def test_where_the_targets_noise_is_unknown_the_likeliest_outcomes_come_first(seed: int) -> None:
    """An engine other than Tandem's draws with noise of its own: ours would only shuffle the outcomes."""
    logits = torch.randn(K + 1, 64, generator=torch.Generator().manual_seed(seed))
    options = replace(SUPPORT, sampling=SamplingParams(1.0, seed=seed))
    likeliest = logits.argsort(-1, descending=True)[:, :16].tolist()
    proposed_ids = [row[0] for row in likeliest[:K]]
    shuffled = rank(logits, proposed_ids, 5, options, TORCH_SAMPLER)
    found = rank(logits, proposed_ids, 5, replace(options, noise_is_unknown=True), TORCH_SAMPLER)
    assert found is not None
    assert [row for row, _ in found.rows] == likeliest
    assert shuffled is not None
    assert [row for row, _ in shuffled.rows] != likeliest


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    made: dict[str, Path] = {}

    def make(family: str) -> LoadedModel:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_checkpoint(made[family], CONFIGS[family]())
        return load_model(made[family], device=DEVICE, dtype="float32", threads=1)

    return make

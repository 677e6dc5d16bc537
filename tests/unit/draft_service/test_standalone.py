"""The distribution that the draft sends is the one it sampled from, and a proposal fits the room of its sequence."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem.drafting.proposal import Drafting, propose_head, propose_where_logits_are
from tandem.engine.core.jobs import Continue, Done, Failed, Job
from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import load_model
from tandem.errors import InvalidRequestError
from tandem.model.sampling.noise import sample, target_keys
from tandem.model.sampling.warping import warp
from tandem.model.types import (
    Delta,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
)
from tandem_draft.proposers.standalone import StandaloneProposer
from tests.paths import DEVICE
from tests.unit.draft_service.test_ahead import proposing
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint
from tests.unit.tandem.tiny_grammars import TEXTS, state_of, text_of

VOCABULARY_SIZE = 50


def logits_of(row_count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(row_count, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def job(
    sampling: SamplingParams,
    kind: RowKind,
    *,
    count: int = 1,
    base_length: int = 7,
    draft_top_k: int = 8,
    support_mass: float = 1.0,
) -> Job[Drafting]:
    options = DraftOptions(
        "r", sampling, row_kind=kind, draft_top_k=draft_top_k, draft_support_mass=support_mass
    )
    sequence = CachedSequence([PageTable(64, 64)], 64, VOCABULARY_SIZE)
    return Job(sequence, Delta(0, []), 1, Drafting(base_length, count, options))


class OtherProcess:
    """Logits in a process of their own, to which everything has to be pickled."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def room(self, sequence: CachedSequence) -> int:
        return 0

    def draft(self, begin: Callable[..., Any], payload: Any, counts: Sequence[int]) -> Any:
        draws = begin(pickle.loads(pickle.dumps(payload)), self._logits, counts)  # noqa: S301
        draws.draw(self._logits)
        return pickle.loads(pickle.dumps(draws.read()))  # noqa: S301


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "where the logits are"])
def test_proposals_hold_to_a_grammar(is_elsewhere: bool) -> None:
    """Beside one without a grammar, over several tokens, whatever the process of the logits."""
    options = DraftOptions("r", SamplingParams(temperature=0.0), prompt_length=2)
    words = ("abca", "abcb")
    row = torch.zeros(1, VOCABULARY_SIZE)
    row[0, TEXTS.index("c")] = 9.0
    jobs = []
    for grammar in (state_of(*words), None):
        sequence = CachedSequence([PageTable(64, 64)], 64, VOCABULARY_SIZE)
        sequence.apply(Delta(0, [7, 7, TEXTS.index("a")]))
        jobs.append(Job(sequence, Delta(3, []), 1, Drafting(3, 2, options, grammar=grammar)))
    logits = row.expand(2, -1)
    outcomes: Sequence[Any] = []
    for _ in range(2):
        outcomes = (
            propose_where_logits_are(jobs, OtherProcess(logits))
            if is_elsewhere
            else propose_head(jobs, logits)
        )
    bound, free = [each.result.token_ids for each in outcomes if isinstance(each, Done)]
    assert free == (TEXTS.index("c"),) * 2
    assert text_of(bound) in ("bc", "bca", "bcb")


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "where the logits are"])
def test_proposals_are_drawn_with_the_requests_penalties(is_elsewhere: bool) -> None:
    """Each token sees the ones before it, and a sequence beside it is drawn without."""
    prompt = (4, 5)
    completion = (6,)
    row = torch.zeros(1, VOCABULARY_SIZE)
    row[0, 4:9] = torch.tensor([8.0, 9.0, 8.5, 8.2, 7.9])
    jobs = []
    for sampling in (
        SamplingParams(0.0, presence_penalty=1.0),
        SamplingParams(0.0, repetition_penalty=2.0),
        SamplingParams(0.0),
    ):
        sequence = CachedSequence([PageTable(64, 64)], 64, VOCABULARY_SIZE)
        sequence.apply(Delta(0, [*prompt, *completion]))
        options = DraftOptions("r", sampling, prompt_length=len(prompt))
        jobs.append(Job(sequence, Delta(3, []), 1, Drafting(3, 3, options)))
    logits = row.expand(3, -1)
    outcomes: Sequence[Any] = []
    for _ in range(3):
        outcomes = (
            propose_where_logits_are(jobs, OtherProcess(logits))
            if is_elsewhere
            else propose_head(jobs, logits)
        )
    found = [each.result.token_ids for each in outcomes if isinstance(each, Done)]
    # Presence counts the completion alone, repetition the prompt as well.
    assert found == [(5, 7, 4), (7, 8, 5), (5, 5, 5)]


def test_a_penalized_distribution_is_the_one_that_was_sampled_from() -> None:
    penalized_job = job(SamplingParams(1.0, seed=3, presence_penalty=2.0), RowKind.SUPPORT, base_length=3)
    penalized_job.sequence.apply(Delta(0, [4, 4, 9]))
    (proposal,) = proposals([penalized_job], logits := logits_of(1))
    wanted = logits.clone()
    wanted[0, [4, 9]] -= 2.0
    top = wanted[0].topk(8)
    (distribution,) = proposal.distributions
    assert distribution.token_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(distribution.probs, top.values.double().softmax(-1).numpy(), atol=1e-6)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(seed=3)])
@pytest.mark.parametrize("kind", [RowKind.TOKEN, RowKind.SUPPORT])
def test_a_proposal_ends_where_no_known_token_is_allowed(sampling: SamplingParams, kind: RowKind) -> None:
    known = torch.full((1, VOCABULARY_SIZE), -torch.inf)
    known[0, TEXTS.index("c")] = 1.0
    for logits, is_failed in ((known, False), (torch.full_like(known, torch.nan), True)):
        own = job(sampling, kind, count=3)
        own.payload.grammar = state_of("ab")
        own.payload.before = []
        (outcome,) = propose_head([own], logits)
        assert isinstance(outcome, Failed if is_failed else Done)
        if isinstance(outcome, Done):
            assert outcome.result.token_ids == ()


def proposals(jobs: Sequence[Job[Drafting]], logits: torch.Tensor) -> list[Proposal]:
    outcomes = propose_head(jobs, logits)
    return [outcome.result for outcome in outcomes if isinstance(outcome, Done)]


SAMPLED = SamplingParams(temperature=0.8, seed=3)


def test_a_greedy_proposal_is_the_argmax_without_a_distribution() -> None:
    logits = logits_of(1)
    (proposal,) = proposals([job(SamplingParams(temperature=0.0), RowKind.TOKEN)], logits)
    assert proposal.token_ids == (int(logits.argmax()),)
    assert proposal.distributions == ()


def test_the_draft_uses_the_targets_noise_at_every_position() -> None:
    """Under `strict` equal models must agree on every token."""
    drafting = job(SAMPLED, RowKind.TOKEN, count=3, base_length=12)
    first, second, outcome = [propose_head([drafting], logits_of(1, step))[0] for step in range(3)]
    assert isinstance(outcome, Done)
    assert isinstance(first, Continue)
    assert isinstance(second, Continue)
    assert outcome.result.token_ids[:2] == (first.token_id, second.token_id)
    logits = torch.cat([logits_of(1, step) for step in range(3)])
    keys = torch.from_numpy(target_keys(SAMPLED.seed, 12, 3))
    assert outcome.result.token_ids == tuple(sample(warp(logits, [SAMPLED] * 3), keys).tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.2),
    ],
)
def test_a_sparse_distribution_is_the_warped_top_of_the_drafts(sampling: SamplingParams) -> None:
    logits = logits_of(1)
    (proposal,) = proposals([job(sampling, RowKind.SUPPORT)], logits)
    (distribution,) = proposal.distributions
    assert isinstance(distribution, SparseDistribution)
    assert len(distribution.token_ids) <= min(8, sampling.top_k or 8)
    assert distribution.probs.sum() == pytest.approx(1.0, abs=1e-12)
    assert (distribution.probs > 0.0).all()
    assert proposal.token_ids[0] in distribution.token_ids
    top = logits[0].topk(8)
    expected = warp(top.values[None], [sampling])[0].numpy()
    np.testing.assert_array_equal(distribution.token_ids, top.indices.numpy()[expected > 0.0])
    np.testing.assert_allclose(distribution.probs, expected[expected > 0.0], rtol=1e-6)


@pytest.mark.parametrize("mass", [0.3, 0.8, 0.97])
def test_a_support_is_the_fewest_tokens_that_hold_the_mass(mass: float) -> None:
    logits = logits_of(1)
    (whole,) = proposals([job(SAMPLED, RowKind.SUPPORT, draft_top_k=16)], logits)
    (bound,) = proposals([job(SAMPLED, RowKind.SUPPORT, draft_top_k=16, support_mass=mass)], logits)
    (all_of_it,) = whole.distributions
    (support,) = bound.distributions
    assert isinstance(all_of_it, SparseDistribution)
    assert isinstance(support, SparseDistribution)
    size = len(support.token_ids)
    assert size < len(all_of_it.token_ids)
    assert all_of_it.probs[:size].sum() >= mass > all_of_it.probs[: size - 1].sum()
    np.testing.assert_array_equal(support.token_ids, all_of_it.token_ids[:size])
    np.testing.assert_allclose(support.probs, all_of_it.probs[:size] / all_of_it.probs[:size].sum())


@pytest.mark.parametrize("mass", [1.0, 0.9])
def test_tokens_are_drawn_from_the_sent_distribution(mass: float) -> None:
    """Chi-square over 4000 rounds, 8 cells; 32 is passed by chance once in 20,000, with fixed seeds never."""
    count = 4000
    jobs = [
        job(SAMPLED, RowKind.SUPPORT, base_length=base_length, support_mass=mass)
        for base_length in range(count)
    ]
    drawn = proposals(jobs, logits_of(1).expand(count, -1))
    distribution = drawn[0].distributions[0]
    assert isinstance(distribution, SparseDistribution)
    expected = distribution.probs * count
    tokens = [proposal.token_ids[0] for proposal in drawn]
    observed = np.array([tokens.count(token_id) for token_id in distribution.token_ids.tolist()])
    assert observed.sum() == count
    assert float(((observed - expected) ** 2 / expected).sum()) < 32.0


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_logits_affect_only_their_own_proposal(number: float) -> None:
    def jobs() -> list[Job[Drafting]]:
        kinds = (RowKind.TOKEN, RowKind.SUPPORT)
        return [job(SAMPLED, kind) for kind in kinds for _ in range(2)]

    logits = logits_of(4)
    expected = proposals(jobs(), logits)
    logits[1::2] = number
    outcomes = propose_head(jobs(), logits)
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [False, True] * 2
    for outcome, proposal in zip(outcomes[::2], expected[::2], strict=True):
        assert isinstance(outcome, Done)
        assert outcome.result.token_ids == proposal.token_ids
    greedy = [job(SamplingParams(temperature=0.0), RowKind.TOKEN) for _ in range(4)]
    assert [isinstance(each, Failed) for each in propose_head(greedy, logits)] == [False, True] * 2


SAMPLED_TEST_ROOM = DraftOptions("r", SamplingParams(seed=3), max_length=12)


@pytest.fixture
async def proposer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandaloneProposer]:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, CONFIGS["llama"]())
    async with proposing(load_model(folder, device=DEVICE, dtype="float32"), max_length=64) as proposer:
        yield proposer


async def test_a_proposal_can_fill_the_sequence_exactly(proposer: StandaloneProposer) -> None:
    prompt = Delta(0, [5, 9, 2])
    async with proposer.sequence(SAMPLED_TEST_ROOM) as sequence:
        # The draft does not read the last of them, so that one more than fits can be drawn.
        assert len(await sequence.propose(ProposeStep(prompt, 10)) or ()) == 10
    for count in (11, 2**31 - 1):
        async with proposer.sequence(SAMPLED_TEST_ROOM) as sequence:
            with pytest.raises(
                InvalidRequestError, match=f"^{count} tokens were asked for after 3, but .* limit is 12$"
            ):
                await sequence.propose(ProposeStep(prompt, count))
            assert len(await sequence.propose(ProposeStep(prompt, 4)) or ()) == 4


async def test_a_sequence_that_is_too_long_is_refused(proposer: StandaloneProposer) -> None:
    async with proposer.sequence(SAMPLED_TEST_ROOM) as sequence:
        with pytest.raises(InvalidRequestError, match="would have 14 tokens, but its limit is 12"):
            await sequence.propose(ProposeStep(Delta(0, [1] * 14), 0))

"""A captured proposal equals that of single steps. The capture here runs the steps eagerly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draft_service.proposers.captured_proposals import CapturedProposals
from draft_service.proposers.draft_head import propose_head
from draft_service.proposers.drafting import Drafting
from draft_service.proposers.standalone import StandaloneProposer, capture_proposals
from tandem.engine.backends.cuda_graphs.buckets import make_buckets
from tandem.engine.backends.cuda_graphs.capture import Capture, Work, without_capture
from tandem.engine.backends.cuda_graphs.captured_steps import GraphContext
from tandem.engine.backends.selection import Backends
from tandem.engine.backends.trial import Reference
from tandem.engine.core.engine import Engine
from tandem.engine.core.events import StepRecord
from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.page_table import PageTable
from tandem.engine.kv_cache.segment import Segment
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.settings import EngineSettings
from tandem.errors import NonFiniteLogitsError
from tandem.types import (
    Delta,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    SparseDistribution,
)
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint

TOP_K = 8
PROMPTS = ([5, 9, 2], [7, 1], [12, 3, 3, 3, 8])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, CONFIGS["llama"]())
    return load_model(folder, dtype="float32")


class Drafts:
    """A proposer and the steps that its engine took."""

    def __init__(self, model: LoadedModel, *, captured: bool) -> None:
        self.steps: list[StepRecord] = []
        self.replayed = 0
        self.spoils = False
        """True if a replay returns NaN."""
        whole: Any = {
            "backends": Backends(model, capture=self._capture),
            "make_proposer": partial(capture_proposals, TOP_K),
        }
        settings = EngineSettings(max_length=64, max_sequences=4, captured_widths=(1, 2))
        engine = Engine(model, propose_head, settings, self.steps.append, **(whole if captured else {}))
        self.proposer = StandaloneProposer(engine, TOP_K)

    def _capture(self, work: Work) -> Work:
        def replay() -> Tensor:
            self.replayed += 1
            drawn = work()
            if (
                self.spoils and not drawn.is_floating_point()
            ):  # the bits of a whole proposal's logits among them
                drawn = drawn.clone()
                drawn[..., 1] = torch.tensor(torch.nan).view(torch.int32)
            return drawn

        return replay

    async def rounds(
        self, prompt: Sequence[int], options: DraftOptions, counts: Sequence[int]
    ) -> list[Proposal]:
        """A proposal for each count, after rounds in which all, one and none of the tokens were accepted in turn."""
        tokens, known, proposals = list(prompt), 0, []
        async with self.proposer.sequence(options) as sequence:
            await sequence.propose(ProposeStep(Delta(0, tokens[:-1]), 0))
            known = len(tokens) - 1
            for number, count in enumerate(counts):
                proposal = await sequence.propose(ProposeStep(Delta(known, tokens[known:]), count))
                assert proposal is not None
                proposals.append(proposal)
                known = len(tokens)
                accepted = (count, 1, 0)[number % 3]
                tokens += [*proposal.token_ids[:accepted], 40 + number]
        return proposals


@asynccontextmanager
async def drafting(model: LoadedModel, *, captured: bool) -> AsyncIterator[Drafts]:
    drafts = Drafts(model, captured=captured)
    await drafts.proposer.start()
    drafts.steps.clear()
    drafts.replayed = 0
    try:
        yield drafts
    finally:
        await drafts.proposer.close()


def assert_same(left: Proposal, right: Proposal) -> None:
    assert left.base_length == right.base_length
    assert left.token_ids == right.token_ids
    assert len(left.distributions) == len(right.distributions)
    for ours, theirs in zip(left.distributions, right.distributions, strict=True):
        assert isinstance(ours, SparseDistribution)
        assert isinstance(theirs, SparseDistribution)
        assert list(ours.token_ids) == list(theirs.token_ids)
        np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-5)
    assert (left.token_logits is None) == (right.token_logits is None)
    if left.token_logits is not None and right.token_logits is not None:
        np.testing.assert_allclose(
            left.token_logits.tolist(), right.token_logits.tolist(), rtol=1e-4, atol=1e-5
        )


GREEDY = DraftOptions("r", SamplingParams(temperature=0.0), row_kind=RowKind.TOKEN)
SAMPLED = [
    DraftOptions("r", SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=11), row_kind=RowKind.SUPPORT,
                 with_token_logits=w)
    for t, k, p, m, w in ((1.0, 0, 1.0, 0.0, False), (0.7, 5, 0.9, 0.0, True), (1.5, 0, 0.6, 0.1, False))
]  # fmt: skip


@pytest.mark.parametrize("options", [GREEDY, *SAMPLED], ids=["greedy", "plain", "truncated", "min_p"])
async def test_a_captured_proposal_of_one_sequence(model: LoadedModel, options: DraftOptions) -> None:
    counts = (4, 3, 1, 4, 2, 4)
    async with drafting(model, captured=False) as single, drafting(model, captured=True) as whole:
        expected = await single.rounds(PROMPTS[0], options, counts)
        proposals = await whole.rounds(PROMPTS[0], options, counts)
    for proposal, other in zip(proposals, expected, strict=True):
        assert_same(proposal, other)
    assert sum(step.row_count > 0 for step in whole.steps) == len(counts), (
        "one return to the host for each proposal"
    )
    assert sum(step.row_count > 0 for step in single.steps) == sum(counts)


async def test_sequences_with_different_options_share_a_capture(model: LoadedModel) -> None:
    wishes = list(zip(PROMPTS, [GREEDY, *SAMPLED[:2]], [(4, 4, 4), (2, 4, 3), (3, 1, 4)], strict=True))
    async with drafting(model, captured=False) as single, drafting(model, captured=True) as whole:
        expected = [await single.rounds(*wish) for wish in wishes]
        proposals = await asyncio.gather(*(whole.rounds(*wish) for wish in wishes))
    for ours, theirs in zip(proposals, expected, strict=True):
        for proposal, other in zip(ours, theirs, strict=True):
            assert_same(proposal, other)


async def test_near_the_end_of_a_sequence_single_steps_are_used(model: LoadedModel) -> None:
    """A capture always runs all of its steps, the last of which would not fit."""
    prompt = [3] * 61
    async with drafting(model, captured=False) as single, drafting(model, captured=True) as whole:
        expected = await single.rounds(prompt, GREEDY, (2,))
        before = whole.replayed
        proposals = await whole.rounds(prompt, GREEDY, (2,))
    assert_same(proposals[0], expected[0])
    assert whole.replayed > before, "the steps themselves are captured ones"


@pytest.mark.parametrize(("prompt_length", "pages", "is_run"), [(58, 1, True), (62, 1, False), (62, 2, True)])
def test_a_proposal_is_captured_only_where_its_pages_are_there(
    model: LoadedModel, prompt_length: int, pages: int, is_run: bool
) -> None:
    """A replay writes all of its tokens' keys and values, and asks nobody for room."""
    arena = KvArena(model.layers, 4, model.dtype, model.device)
    buckets = make_buckets(2, (1, 2))
    graphs = GraphContext(model, arena, Reference(model), buckets, without_capture, 192)
    proposals = capture_proposals(TOP_K, graphs)
    assert proposals.tokens_ahead == 7
    assert all(outcome.reason is None for outcome in proposals.outcomes)
    table = PageTable(arena.page_tokens, 192, range(pages))
    sequence = CachedSequence(table, 192, model.info.vocabulary_size)
    sequence.token_ids = [3] * prompt_length
    sequence.advance(prompt_length - 1)
    job = Job(sequence, Delta(0, []), 1, Drafting(prompt_length, 4, GREEDY, TOP_K))
    with torch.inference_mode():
        found = proposals.run([Segment(sequence, 1)], [job])
    assert (found is not None) == is_run
    assert sequence.length == prompt_length + 3 * is_run


async def test_strict_draws_from_the_whole_vocabulary_step_by_step(model: LoadedModel) -> None:
    options = DraftOptions("r", SamplingParams(temperature=1.0, seed=5), row_kind=RowKind.TOKEN)
    async with drafting(model, captured=False) as single, drafting(model, captured=True) as whole:
        expected = await single.rounds(PROMPTS[1], options, (4, 4))
        proposals = await whole.rounds(PROMPTS[1], options, (4, 4))
    assert [proposal.token_ids for proposal in proposals] == [proposal.token_ids for proposal in expected]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED[0]], ids=["greedy", "sampled"])
async def test_non_finite_logits_affect_only_their_own_proposal(
    model: LoadedModel, options: DraftOptions
) -> None:
    async with drafting(model, captured=True) as whole:
        expected = await whole.rounds(PROMPTS[1], options, (4,))
        whole.spoils = True
        with pytest.raises(NonFiniteLogitsError, match="are not finite numbers"):
            await whole.rounds(PROMPTS[0], options, (4,))
        whole.spoils = False
        proposals = await whole.rounds(PROMPTS[1], options, (4,))
    assert_same(proposals[0], expected[0])


def refuse(_: Work) -> Work:
    raise RuntimeError("operation not permitted when stream is capturing")


def spoil(work: Work) -> Work:
    """A capture whose replay computes wrong results."""
    return lambda: work() + 1


@pytest.mark.parametrize(
    ("capture", "reason"),
    [(refuse, "RuntimeError: operation not permitted"), (spoil, "its error is")],
)
async def test_uncaptured_proposals_are_drawn_step_by_step(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, capture: Capture, reason: str
) -> None:
    def with_a_fault(graphs: GraphContext) -> CapturedProposals:
        return capture_proposals(TOP_K, replace(graphs, capture=capture))

    settings = EngineSettings(max_length=64, max_sequences=4, captured_widths=(1, 2))
    engine = Engine(
        model,
        propose_head,
        settings,
        backends=Backends(model, capture=without_capture),
        make_proposer=with_a_fault,
    )
    drafts = Drafts(model, captured=False)
    drafts.proposer = StandaloneProposer(engine, TOP_K)
    await drafts.proposer.start()
    try:
        (proposal,) = await drafts.rounds(PROMPTS[0], GREEDY, (4,))
    finally:
        await drafts.proposer.close()
    async with drafting(model, captured=False) as single:
        (expected,) = await single.rounds(PROMPTS[0], GREEDY, (4,))
    assert_same(proposal, expected)
    (warning,) = [record for record in caplog.records if "could not be captured" in record.message]
    reasons = vars(warning)["not_captured"]
    assert set(reasons) == {f"{sequences} x 2, {count} tokens" for sequences in (1, 4) for count in (2, 4, 8)}
    assert all(reason in found for found in reasons.values())

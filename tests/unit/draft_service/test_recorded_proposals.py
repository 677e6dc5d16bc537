"""A proposal that is recorded whole is the one that single steps make. The recorder here plays the work directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from draft_service.proposers.recorded_proposals import RecordedProposals
from draft_service.proposers.standalone import StandaloneProposer, propose_head, record_proposals
from tandem.engine.engine import Engine
from tandem.engine.model import LoadedModel, load_model
from tandem.engine.recording import Recorder, Work
from tandem.engine.settings import EngineSettings
from tandem.engine.worker import StepRecord
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

    def __init__(self, model: LoadedModel, *, recorded: bool) -> None:
        self.steps: list[StepRecord] = []
        self.played = 0
        record: Any = {"recorder": self._recorder, "make_run_ahead": partial(record_proposals, TOP_K)}
        settings = EngineSettings(max_length=64, max_sequences=4, recorded_widths=(1, 2))
        engine = Engine(model, propose_head, settings, self.steps.append, **(record if recorded else {}))
        self.proposer = StandaloneProposer(engine, TOP_K)

    def _recorder(self, work: Work) -> Work:
        def play() -> Tensor:
            self.played += 1
            return work()

        return play

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
                proposals.append(proposal)
                known = len(tokens)
                accepted = (count, 1, 0)[number % 3]
                tokens += [*proposal.token_ids[:accepted], 40 + number]
        return proposals


@asynccontextmanager
async def drafting(model: LoadedModel, *, recorded: bool) -> AsyncIterator[Drafts]:
    drafts = Drafts(model, recorded=recorded)
    await drafts.proposer.start()
    drafts.steps.clear()
    drafts.played = 0
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
async def test_one_sequence(model: LoadedModel, options: DraftOptions) -> None:
    counts = (4, 3, 1, 4, 2, 4)
    async with drafting(model, recorded=False) as single, drafting(model, recorded=True) as whole:
        expected = await single.rounds(PROMPTS[0], options, counts)
        proposals = await whole.rounds(PROMPTS[0], options, counts)
    for proposal, other in zip(proposals, expected, strict=True):
        assert_same(proposal, other)
    assert sum(step.row_count > 0 for step in whole.steps) == len(counts), (
        "one return to the host for each proposal"
    )
    assert sum(step.row_count > 0 for step in single.steps) == sum(counts)


async def test_several_sequences_of_different_wishes(model: LoadedModel) -> None:
    wishes = list(zip(PROMPTS, [GREEDY, *SAMPLED[:2]], [(4, 4, 4), (2, 4, 3), (3, 1, 4)], strict=True))
    async with drafting(model, recorded=False) as single, drafting(model, recorded=True) as whole:
        expected = [await single.rounds(*wish) for wish in wishes]
        proposals = await asyncio.gather(*(whole.rounds(*wish) for wish in wishes))
    for ours, theirs in zip(proposals, expected, strict=True):
        for proposal, other in zip(ours, theirs, strict=True):
            assert_same(proposal, other)


async def test_near_the_end_of_a_sequence_single_steps_do_it(model: LoadedModel) -> None:
    """A recording always runs all of its steps, the last of which would not fit."""
    prompt = [3] * 61
    async with drafting(model, recorded=False) as single, drafting(model, recorded=True) as whole:
        expected = await single.rounds(prompt, GREEDY, (2,))
        before = whole.played
        proposals = await whole.rounds(prompt, GREEDY, (2,))
    assert_same(proposals[0], expected[0])
    assert whole.played > before, "the steps themselves are recorded ones"


async def test_strict_draws_from_the_whole_vocabulary_step_by_step(model: LoadedModel) -> None:
    options = DraftOptions("r", SamplingParams(temperature=1.0, seed=5), row_kind=RowKind.TOKEN)
    async with drafting(model, recorded=False) as single, drafting(model, recorded=True) as whole:
        expected = await single.rounds(PROMPTS[1], options, (4, 4))
        proposals = await whole.rounds(PROMPTS[1], options, (4, 4))
    assert [proposal.token_ids for proposal in proposals] == [proposal.token_ids for proposal in expected]


def refuse(_: Work) -> Work:
    raise RuntimeError("operation not permitted when stream is capturing")


def spoil(work: Work) -> Work:
    """A recording that plays something else than what it has seen."""
    return lambda: work() + 1


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [(refuse, "RuntimeError: operation not permitted"), (spoil, "its draws differ by")],
)
async def test_what_cannot_be_recorded_is_drawn_step_by_step(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, recorder: Recorder, reason: str
) -> None:
    def recording_proposals_alone(runner: Any, buckets: Any, _: Recorder) -> RecordedProposals:
        return record_proposals(TOP_K, runner, buckets, recorder)

    settings = EngineSettings(max_length=64, max_sequences=4, recorded_widths=(1, 2))
    engine = Engine(
        model,
        propose_head,
        settings,
        recorder=lambda work: work,
        make_run_ahead=recording_proposals_alone,
    )
    drafts = Drafts(model, recorded=False)
    drafts.proposer = StandaloneProposer(engine, TOP_K)
    await drafts.proposer.start()
    try:
        (proposal,) = await drafts.rounds(PROMPTS[0], GREEDY, (4,))
    finally:
        await drafts.proposer.close()
    async with drafting(model, recorded=False) as single:
        (expected,) = await single.rounds(PROMPTS[0], GREEDY, (4,))
    assert_same(proposal, expected)
    (warning,) = [record for record in caplog.records if "could not be recorded" in record.message]
    assert reason in vars(warning)["reason"]

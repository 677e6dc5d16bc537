"""A captured proposal equals that of single steps. The capture here runs the steps eagerly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.proposers.captured_proposals import CapturedProposals
from draft_service.proposers.drafting import propose_head
from draft_service.proposers.standalone import StandaloneProposer, capture_proposals
from tandem.engine.backends.cuda_graphs.capture import Capture, Work, without_capture
from tandem.engine.backends.cuda_graphs.captured_steps import GraphContext
from tandem.engine.backends.selection import Backends
from tandem.engine.core.engine import Engine
from tandem.engine.core.events import StepRecord
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
)
from tests.unit.draft_service.proposals import GREEDY, SAMPLED, TOP_K, assert_same
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint

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


@pytest.mark.parametrize("prompt_length", [62, 63, 64])
async def test_a_proposal_up_to_the_end_of_a_sequence_is_captured(
    model: LoadedModel, prompt_length: int
) -> None:
    """The keys of its last token are not written."""
    prompt, count = [3] * prompt_length, 64 - prompt_length + 1
    async with drafting(model, captured=False) as single, drafting(model, captured=True) as whole:
        (expected,) = await single.rounds(prompt, GREEDY, (count,))
        (proposal,) = await whole.rounds(prompt, GREEDY, (count,))
    assert_same(proposal, expected)
    assert sum(step.row_count > 0 for step in whole.steps) == 1


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
    sizes = product((1, 4), range(1, 9))
    assert set(reasons) == {f"{sequences} x 2, {count} tokens" for sequences, count in sizes}
    assert all(reason in found for found in reasons.values())

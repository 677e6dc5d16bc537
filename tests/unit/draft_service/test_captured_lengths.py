"""Which jobs are drawn by captured proposals, by which of them, and what is written meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from draft_service.proposers.drafting import Drafting
from draft_service.proposers.standalone import capture_proposals
from tandem.engine.backends.cuda_graphs.buckets import make_buckets
from tandem.engine.backends.cuda_graphs.capture import Capture, Work, without_capture
from tandem.engine.backends.cuda_graphs.captured_steps import GraphContext
from tandem.engine.backends.trial import Reference
from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.arena import KvArena, PageTable
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.types import Delta, DraftOptions, Proposal, RowKind, SamplingParams
from tests.unit.draft_service.proposals import GREEDY, SAMPLED, TOP_K, assert_same
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, CONFIGS["llama"]())
    return load_model(folder, dtype="float32")


_PAGES = 32


class ByHand:
    """Captured proposals and an arena to look into."""

    def __init__(self, model: LoadedModel, capture: Capture = without_capture) -> None:
        self.model = model
        self.arena = KvArena(model.layers, _PAGES, model.dtype, model.device)
        for layer in self.arena.layers:
            layer.keys.zero_()
            layer.values.zero_()
        buckets = make_buckets(4, (1, 2))
        graphs = GraphContext(model, self.arena, Reference(model), buckets, capture, 192)
        self.proposals = capture_proposals(TOP_K, graphs)
        self.passes = 0
        """Forward passes since the captures."""
        self._pages = iter(range(_PAGES))

    def job(
        self, token_count: int, length: int = 10, options: DraftOptions = GREEDY, pages: int = 1
    ) -> Job[Drafting]:
        """A job whose sequence has one uncomputed token, and pages of its own."""
        table = PageTable(self.arena.page_tokens, 192, list(islice(self._pages, pages)))
        sequence = CachedSequence(table, 192, self.model.info.vocabulary_size)
        sequence.token_ids = [3] * length
        sequence.advance(length - 1)
        return Job(sequence, Delta(0, []), 1, Drafting(length, token_count, options, TOP_K))

    def run(self, jobs: Sequence[Job[Drafting]]) -> list[Proposal]:
        """The proposals."""
        hook = self.model.module.register_forward_hook(self._count)
        segments = [Segment(job.sequence, job.sequence.pending_count) for job in jobs]
        with torch.inference_mode():
            proposals = self.proposals.run(segments, jobs)
        hook.remove()
        assert all(isinstance(proposal, Proposal) for proposal in proposals)
        return proposals  # type: ignore[return-value]

    def takes(self, job: Job[Drafting], token_count: int | None = None) -> bool:
        """True if a capture takes the next so many tokens of a job, or all of them."""
        count = job.sequence.pending_count if token_count is None else token_count
        return self.proposals.takes(Segment(job.sequence, count), job)

    def _count(self, *_: object) -> None:
        self.passes += 1


@pytest.fixture(scope="module")
def drafts(model: LoadedModel) -> ByHand:
    return ByHand(model)


def test_a_proposal_runs_as_many_steps_as_it_has_tokens(drafts: ByHand) -> None:
    for count in range(1, 9):
        drafts.passes = 0
        (proposal,) = drafts.run([drafts.job(count)])
        assert len(proposal) == drafts.passes == count


@pytest.mark.parametrize("options", [GREEDY, SAMPLED[0]], ids=["greedy", "sampled"])
def test_the_longest_of_a_batch_decides_and_the_others_write_only_their_own(
    drafts: ByHand, options: DraftOptions
) -> None:
    """A short proposal may end where the sequence's pages do."""

    def jobs() -> list[Job[Drafting]]:
        return [drafts.job(2, length=63, options=options), drafts.job(5, options=options), drafts.job(1)]

    together = jobs()
    drafts.passes = 0
    proposals = drafts.run(together)
    assert drafts.passes == 5
    assert [len(proposal) for proposal in proposals] == [2, 5, 1]
    for proposal, job in zip(proposals, jobs(), strict=True):
        (expected,) = drafts.run([job])
        assert_same(proposal, expected)
    assert [job.sequence.length for job in together] == [64, 14, 10]
    keys = drafts.arena.layers[0].keys
    written = [int(keys[job.sequence.table[0]].any(dim=-1).any(dim=-1).sum()) for job in together]
    assert written == [2, 5, 1], "the tokens before were computed by nobody"


@pytest.mark.parametrize(
    ("prompt_length", "pages", "is_taken"), [(61, 1, True), (62, 1, False), (62, 2, True)]
)
def test_a_proposal_is_captured_only_where_its_pages_are_there(
    drafts: ByHand, prompt_length: int, pages: int, is_taken: bool
) -> None:
    """A replay writes all of its tokens' keys and values, and asks nobody for room."""
    assert drafts.proposals.tokens_ahead == 7
    assert all(outcome.reason is None for outcome in drafts.proposals.outcomes)
    job = drafts.job(4, prompt_length, pages=pages)
    assert drafts.takes(job) == is_taken
    if is_taken:
        drafts.run([job])
        assert job.sequence.length == prompt_length + 3


def test_jobs_are_taken_one_by_one(drafts: ByHand) -> None:
    whole = DraftOptions("r", SamplingParams(temperature=1.0), row_kind=RowKind.TOKEN)
    begun, filling, wide, prompt = (drafts.job(4) for _ in range(4))
    begun.payload.token_ids.append(3)
    filling.row_count = 0
    wide.sequence.apply(Delta(10, [3, 3]))
    prompt.sequence.apply(Delta(10, [3]))
    assert [drafts.takes(drafts.job(count)) for count in (1, 8, 9)] == [True, True, False]
    assert not drafts.takes(drafts.job(4, options=whole)), "it draws from the whole vocabulary"
    assert not any(drafts.takes(job) for job in (begun, filling, wide))
    assert drafts.takes(prompt)
    assert not drafts.takes(prompt, 1), "another step comes before the rows"


class _OnlyShort:
    """Captures no proposal of more than two tokens but those of one sequence."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, work: Work) -> Work:
        self._turn += 1
        if self._turn <= 6:  # of four sequences, the longest first
            raise RuntimeError("out of memory")
        return work


def test_a_batch_that_no_capture_holds_is_drawn_in_parts(model: LoadedModel) -> None:
    drafts = ByHand(model, _OnlyShort())
    missing = [outcome.shape for outcome in drafts.proposals.outcomes if outcome.reason is not None]
    assert missing == [f"4 x 2, {count} tokens" for count in range(3, 9)]
    proposals = drafts.run([drafts.job(count) for count in (4, 2, 1, 2)])
    assert [len(proposal) for proposal in proposals] == [4, 2, 1, 2]
    assert drafts.passes == 4 + 2, "one sequence alone, then three at once"

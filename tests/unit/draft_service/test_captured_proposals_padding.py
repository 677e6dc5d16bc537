"""Nothing that padding writes or reads reaches a captured proposal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.proposers.drafting import Drafting
from draft_service.proposers.standalone import capture_proposals
from tandem.engine.backends.cuda_graphs.buckets import make_buckets
from tandem.engine.backends.cuda_graphs.capture import without_capture
from tandem.engine.backends.cuda_graphs.captured_steps import GraphContext
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.trial import Reference
from tandem.engine.core.jobs import Job
from tandem.engine.kv_cache.sequence import Segment
from tandem.types import Delta, DraftOptions, Proposal, RowKind, SamplingParams, SparseDistribution
from tests.unit.engine.backends.by_hand import ByHand, some_tokens

TOP_K = 8
TEXTS = [some_tokens(90), some_tokens(3, 1), some_tokens(64, 2)]
"""Their proposals begin in the middle of a page, and at the beginning of one."""
SAMPLED = DraftOptions("r", SamplingParams(temperature=1.0, seed=3), row_kind=RowKind.SUPPORT)


def _proposals(folder: Path, counts: Sequence[int], *, poisoned: bool) -> list[Proposal]:
    """Of three sequences in a capture for four, which read one and two tokens first."""
    by_hand = ByHand(folder, "llama")
    model = by_hand.model
    graphs = GraphContext(model, by_hand.arena, Reference(model), make_buckets(4, (2,)), without_capture, 192)
    captured = capture_proposals(TOP_K, graphs)
    if poisoned:
        by_hand.poison()
    by_hand.step(
        eager_backend(model, by_hand.arena),
        [text[:-width] for text, width in zip(TEXTS, counts, strict=True)],
    )
    segments, jobs = [], []
    for sequence, text, width in zip(by_hand.sequences, TEXTS, counts, strict=False):
        sequence.token_ids.extend(text[-width:])
        segments.append(Segment(sequence, width))
        jobs.append(Job(sequence, Delta(0, []), 1, Drafting(len(text), 4, SAMPLED, TOP_K)))
    with torch.inference_mode():
        found = captured.run(segments, jobs)
    assert found is not None
    assert all(isinstance(proposal, Proposal) for proposal in found)
    return [proposal for proposal in found if isinstance(proposal, Proposal)]


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_nan_in_all_other_pages_and_the_spare_one_stays_there(counts: Sequence[int], tmp_path: Path) -> None:
    poisoned, clean = (_proposals(tmp_path, counts, poisoned=poisoned) for poisoned in (True, False))
    for ours, theirs in zip(poisoned, clean, strict=True):
        assert ours.token_ids == theirs.token_ids
        for left, right in zip(ours.distributions, theirs.distributions, strict=True):
            assert isinstance(left, SparseDistribution)
            assert isinstance(right, SparseDistribution)
            np.testing.assert_allclose(left.probs, right.probs, rtol=1e-5)

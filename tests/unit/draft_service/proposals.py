"""Options of drafts, and a comparison of their proposals, for several tests."""

from __future__ import annotations

import numpy as np

from tandem.types import DraftOptions, Proposal, RowKind, SamplingParams, SparseDistribution

TOP_K = 8


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

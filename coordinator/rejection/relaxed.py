"""Relaxed acceptance for thinking (MAX's `use_relaxed_acceptance_for_thinking`). Not lossless.

Inside a think span a token passes when it is one of the target's top k and not much less probable than the argmax.
Outside, the wrapped rule decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from coordinator.rejection.rows import check_rows, target_distribution
from coordinator.rejection.uniforms import Uniforms
from tandem.types import Acceptance, NextToken, Proposal, SamplingParams, Verification

DEFAULT_TOP_K = 10
DEFAULT_DELTA = 0.6

Accept = Callable[[Proposal, Verification, SamplingParams, Uniforms], Acceptance]
"""An acceptance rule."""


def accept(
    proposal: Proposal,
    verification: Verification,
    sampling: SamplingParams,
    uniforms: Uniforms,
    wrapped: Accept,
    thinking: Sequence[bool],
    top_k: int = DEFAULT_TOP_K,
    delta: float = DEFAULT_DELTA,
) -> Acceptance:
    """Apply relaxed acceptance inside think spans and the wrapped rule outside them, up to the first rejection.

    Args:
        proposal: K tokens.
        verification: Rows with statistics.
        sampling: The request's sampling parameters.
        uniforms: For the wrapped rule.
        wrapped: The rule outside think spans, and for the bonus token.
        thinking: For each proposed token, True if its position is inside a think span, shape [K].
        top_k: Inside a span the token must be one of this many most probable tokens.
        delta: Inside a span its probability must be at least the maximum minus this.

    Raises:
        RowError: The rows leave out a proposed token, lack statistics, or do not fit the proposal.
    """
    check_rows(proposal, verification)
    start = 0
    for inside, span in groupby(thinking[: len(proposal)]):
        stop = start + len(list(span))
        if inside:
            acceptance = _accept_inside(proposal, verification, sampling, range(start, stop), top_k, delta)
            if acceptance is not None:
                return acceptance
        else:
            acceptance = wrapped(*_part(proposal, verification, sampling, uniforms, start, stop))
            if stop == len(proposal) or acceptance.accepted_count < stop - start:
                return replace(acceptance, accepted_count=start + acceptance.accepted_count)
        start = stop
    bonus = wrapped(*_part(proposal, verification, sampling, uniforms, start, start))
    return replace(bonus, accepted_count=start)


def _accept_inside(
    proposal: Proposal,
    verification: Verification,
    sampling: SamplingParams,
    span: range,
    top_k: int,
    delta: float,
) -> Acceptance | None:
    """Return the acceptance that ends inside this span, None if the whole span is accepted."""
    for index in span:
        token_id = proposal.token_ids[index]
        target = target_distribution(verification, index, np.array([token_id]), sampling)
        statistics = target.statistics()
        is_in_top_k = statistics.ranks[target.index(token_id)] < top_k
        if not (is_in_top_k and target.prob(token_id) >= statistics.max_prob - delta):
            return Acceptance(index, statistics.argmax_token_id, NextToken.RECOVERED)
    return None


def _part(
    proposal: Proposal,
    verification: Verification,
    sampling: SamplingParams,
    uniforms: Uniforms,
    start: int,
    stop: int,
) -> tuple[Proposal, Verification, SamplingParams, Uniforms]:
    """Return the arguments of a round that proposes only the tokens from `start` to before `stop`."""
    logits = proposal.token_logits
    part = Proposal(
        proposal.base_length + start,
        proposal.token_ids[start:stop],
        proposal.distributions[start:stop],
        None if logits is None else logits[start:stop],
    )
    rows = Verification(verification.base_length + start, verification.rows[start : stop + 1])
    return part, rows, sampling, uniforms.part(start, stop)

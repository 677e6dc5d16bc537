"""Several heads that each propose one token in the same pass (Medusa, Cai et al. 2024, arXiv 2401.10774), beside their
target: the chain of their tokens, without a tree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from draft_service.proposers.draft_head import extended
from draft_service.proposers.drafting import Drafting, Outcome
from draft_service.proposers.heads.bound import BoundSequence, HeadKind, finished
from tandem.engine.backends.hidden_states.pairing import Pairing
from tandem.engine.backends.interface import Sampler
from tandem.engine.core.jobs import Continue, Job
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence

logger = logging.getLogger(__name__)

_MORE = Continue(-1)
"""Stands for proposals that have no token yet."""


class PassLimit:
    """How many tokens a proposal of one pass can have: one for each head."""

    def __init__(self, tokens_per_pass: int) -> None:
        self._tokens_per_pass = tokens_per_pass
        self._is_reported = False

    def applied(self, token_count: int) -> int:
        """As many of the tokens that are asked for as there can be. The first time that these are fewer is logged."""
        if token_count <= self._tokens_per_pass:
            return token_count
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "%d tokens were asked for, but the draft has %d heads, which propose one token each; proposals have at "
                "most as many: set num_speculative_tokens to %d",
                token_count,
                self._tokens_per_pass,
                self._tokens_per_pass,
            )
        return self._tokens_per_pass


class ParallelSequence(BoundSequence):
    """One sequence that several heads draft for."""

    def __init__(self, *arguments: Any, limit: PassLimit) -> None:
        super().__init__(*arguments)
        self._limit = limit

    def _possible(self, token_count: int) -> int:
        return self._limit.applied(token_count)


def parallel_kind(tokens_per_pass: int) -> HeadKind:
    """Proposals of one pass, of as many tokens as there are heads."""
    make = partial(ParallelSequence, limit=PassLimit(tokens_per_pass))
    return HeadKind(make, partial(_extend, tokens_per_pass=tokens_per_pass))


def _extend(
    ready: Sequence[Job[Drafting]],
    logits: Tensor,
    *,
    pairings: dict[CachedSequence, Pairing],
    sampler: Sampler,
    tokens_per_pass: int,
) -> list[Outcome]:
    """Head of the engine: the whole proposal of each job."""
    outcomes = _drawn([job.payload for job in ready], logits, sampler, tokens_per_pass)
    return [
        finished(job, outcome, pairings.get(job.sequence))
        for job, outcome in zip(ready, outcomes, strict=True)
    ]


def _drawn(
    draftings: Sequence[Drafting], logits: Tensor, sampler: Sampler, tokens_per_pass: int
) -> list[Outcome]:
    """Draw a pass's tokens.

    Args:
        draftings: The proposals in the making; none wants more tokens than a pass has.
        logits: [len(draftings), tokens_per_pass * vocabulary_size], a pass's first token first.
        sampler: What computes and draws.
        tokens_per_pass: Tokens that each row foresees.
    """
    outcomes: dict[int, Outcome] = {}
    for rows in logits.view(len(draftings), tokens_per_pass, -1).unbind(1):
        unfinished = [i for i in range(len(draftings)) if isinstance(outcomes.get(i, _MORE), Continue)]
        if not unfinished:
            break
        own = rows if len(unfinished) == len(draftings) else rows[unfinished]
        drawn = extended([draftings[i] for i in unfinished], own, sampler)
        outcomes.update(zip(unfinished, drawn, strict=True))
    return [outcomes[i] for i in range(len(draftings))]

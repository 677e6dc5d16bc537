"""A draft model's proposal in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tandem.engine.jobs import Continue, Done
from tandem.noise import proposal_keys, target_keys
from tandem.types import DraftDistribution, DraftOptions, Proposal, RowKind, SamplingParams

Outcome = Done[Proposal] | Continue


@dataclass(slots=True)
class Drafting:
    """A proposal in the making."""

    base_length: int
    token_count: int
    options: DraftOptions
    draft_top_k: int
    token_ids: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    token_logits: list[float] = field(default_factory=list)

    @property
    def next_key(self) -> int:
        """Keys the noise of the next token: the target's own where the draft is to anticipate it."""
        sampling, drawn = self.options.sampling, len(self.token_ids)
        if self.options.row_kind is RowKind.TOKEN:
            return int(target_keys(sampling.seed, self.base_length + drawn, 1)[0])
        return int(proposal_keys(sampling.seed, self.base_length, drawn + 1)[drawn])

    def outcome(self) -> Outcome:
        """Draw another token, or hand the proposal over."""
        if len(self.token_ids) < self.token_count:
            return Continue(self.token_ids[-1])
        logits = np.array(self.token_logits, dtype=np.float32) if self.options.with_token_logits else None
        return Done(Proposal(self.base_length, tuple(self.token_ids), tuple(self.distributions), logits))


def truncated(drafting: Drafting) -> SamplingParams:
    """The request's sampling parameters with the draft's own limit on the number of tokens."""
    sampling = drafting.options.sampling
    top_k = min(sampling.top_k or drafting.draft_top_k, drafting.draft_top_k)
    return SamplingParams(sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.seed)

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
    _keys: list[int] = field(default_factory=list)
    """Of all tokens, made when the first is drawn: for four they cost no more than for one."""

    @property
    def next_key(self) -> int:
        """Keys the noise of the next token: the target's own where the draft is to anticipate it."""
        if not self._keys:
            keys_of = target_keys if self.options.row_kind is RowKind.TOKEN else proposal_keys
            keys = keys_of(self.options.sampling.seed, self.base_length, self.token_count)
            self._keys.extend(keys.tolist())
        return self._keys[len(self.token_ids)]

    def outcome(self) -> Outcome:
        """Draw another token, or hand the proposal over."""
        if len(self.token_ids) < self.token_count:
            return Continue(self.token_ids[-1])
        logits = np.array(self.token_logits, dtype=np.float32) if self.options.with_token_logits else None
        return Done(Proposal(self.base_length, tuple(self.token_ids), tuple(self.distributions), logits))


def truncated(drafting: Drafting, candidate_count: int | None = None) -> SamplingParams:
    """The request's sampling parameters with the draft's own limit on the number of tokens.

    Args:
        drafting: the proposal in the making.
        candidate_count: to how many tokens they will be applied; a limit that leaves out none of these is not stated.
    """
    sampling = drafting.options.sampling
    top_k = min(sampling.top_k or drafting.draft_top_k, drafting.draft_top_k)
    if candidate_count is not None and top_k >= candidate_count:
        top_k = 0
    return SamplingParams(sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.seed)

"""A draft model's proposal in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tandem.engine.core.jobs import Continue, Done, Failed
from tandem.sampling.noise import proposal_keys, target_keys
from tandem.types import DraftDistribution, DraftOptions, Proposal, RowKind, SamplingParams

Outcome = Done[Proposal] | Failed | Continue


@dataclass(slots=True)
class Drafting:
    """A proposal in the making."""

    base_length: int
    token_count: int
    options: DraftOptions
    draft_top_k: int
    support_mass: float = 1.0
    """Share of the `draft_top_k` tokens' probability that the support must hold."""
    token_ids: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    token_logits: list[float] = field(default_factory=list)
    _keys: list[int] = field(default_factory=list)
    """Noise keys of all tokens, computed with the first: four cost no more than one."""
    _truncated: tuple[int | None, SamplingParams] | None = None
    """The last parameters of `truncated` and their count: the same for each token."""

    @property
    def next_key(self) -> int:
        """Key of the next token's noise: the target's own key where the draft should anticipate the target's sample."""
        if not self._keys:
            keys_of = target_keys if self.options.row_kind is RowKind.TOKEN else proposal_keys
            keys = keys_of(self.options.sampling.seed, self.base_length, self.token_count)
            self._keys.extend(keys.tolist())
        return self._keys[len(self.token_ids)]

    def outcome(self) -> Outcome:
        """Continue with another token, or deliver the proposal."""
        if len(self.token_ids) < self.token_count:
            return Continue(self.token_ids[-1])
        logits = np.array(self.token_logits, dtype=np.float32) if self.options.with_token_logits else None
        return Done(Proposal(self.base_length, tuple(self.token_ids), tuple(self.distributions), logits))

    def truncated(self, candidate_count: int | None = None) -> SamplingParams:
        """The request's sampling parameters with the draft's own limit on the number of tokens.

        Args:
            candidate_count: Number of tokens to which the parameters will be applied. A top-k that keeps all of them
                is left out.
        """
        if self._truncated is None or self._truncated[0] != candidate_count:
            sampling = self.options.sampling
            top_k = min(sampling.top_k or self.draft_top_k, self.draft_top_k)
            if candidate_count is not None and top_k >= candidate_count:
                top_k = 0
            self._truncated = (
                candidate_count,
                SamplingParams(sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.seed),
            )
        return self._truncated[1]

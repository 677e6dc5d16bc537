"""Options of the acceptance rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.rejection import relaxed, typical


@dataclass(frozen=True, slots=True)
class RejectionOptions:
    """Options of the acceptance rules, named as in MAX and vLLM."""

    rejection_sampling_strategy: str | None = None
    """Name or alias of a rule; None chooses by `speculative_method` (see `resolve`)."""
    speculative_method: str = "standalone"
    """The drafting method: standalone, eagle, eagle3, mtp, medusa, ngram, suffix."""
    num_speculative_tokens: int = 2
    """Maximum number of tokens in a proposal."""
    typical_epsilon: float = typical.DEFAULT_EPSILON
    """Typical acceptance: a token with a probability above this always passes."""
    typical_delta: float = typical.DEFAULT_DELTA
    """Typical acceptance: factor of exp(-entropy)."""
    synthetic_acceptance_rate: float | None = None
    """MAX: accept this share of the proposed tokens on average, whatever the models predict."""
    synthetic_acceptance_rates: Sequence[float] | None = None
    """vLLM: the probability that the token at each position is accepted, non-increasing."""
    synthetic_acceptance_length: float | None = None
    """vLLM: mean number of tokens per round, the one after the accepted run included."""
    use_relaxed_acceptance_for_thinking: bool = False
    """MAX: inside think spans, accept tokens among the target's top k."""
    relaxed_topk: int = relaxed.DEFAULT_TOP_K
    """Relaxed acceptance: k, the number of most probable tokens that may pass."""
    relaxed_delta: float = relaxed.DEFAULT_DELTA
    """Relaxed acceptance: how far a token's probability may lie below the maximum."""

"""How proposed tokens are accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import field_validator

from tandem.acceptance_names import AUTO, NAMES, SPELLINGS, canonical_name
from tandem.config.options import Options
from tandem.config.rule import Rule, at_least, within

MAX_CONFIGURED_TOKENS = 128
"""Maximum tokens per proposal in the configuration. The limit on the size of services' messages has room for that many
rows, so that it stays the same while the option changes live."""


class AcceptanceOptions(Options):
    """How proposed tokens are accepted.

    This class checks ranges; `coordinator.rejection` checks combinations for the acceptance rules.
    """

    num_speculative_tokens: int = 2
    """Tokens proposed for each verification, unless a request says otherwise. MAX's and vLLM's name, MAX's default."""
    rejection_sampling_strategy: str | None = None
    """Acceptance rule, unless a request says otherwise: greedy, residual, block, strict, typical-acceptance,
    logit-comparison or synthetic; auto picks the fastest of block, strict and residual, which are lossless, for the
    pair, temperature and load. By default residual. MAX's name; vLLM: rejection_sample_method, with probabilistic or
    standard for residual."""
    typical_epsilon: float = 0.09
    """typical-acceptance: a token of more than this probability is always accepted. Tandem's own."""
    typical_delta: float = 0.3
    """typical-acceptance: factor of exp(-entropy), which is enough as well. Tandem's own."""
    synthetic_acceptance_rate: float | None = None
    """synthetic: share of the proposed tokens to accept on average, for benchmarks. MAX's name."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """synthetic: for each position, the probability that its token is accepted; none is above the one before.
    vLLM's name."""
    synthetic_acceptance_length: float | None = None
    """synthetic: average tokens per round, including the target's own. vLLM's name."""
    use_relaxed_acceptance_for_thinking: bool = False
    """Inside think spans, accept tokens among the target's most probable ones; not lossless. MAX's name."""
    relaxed_topk: int = 10
    """Relaxed acceptance: the token is among this many most probable ones. MAX's name."""
    relaxed_delta: float = 0.6
    """Relaxed acceptance: its probability is at most this far below the highest. MAX's name."""
    draft_top_k: int = 0
    """Number of most probable tokens from which the draft samples when it sends its distribution; 0 leaves it to the
    draft service. Tandem's own."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for each of them alone."""
        return (*super().rules(), *ACCEPTANCE_RULES)

    @field_validator("synthetic_acceptance_rates", mode="before")
    @classmethod
    def _from_text(cls, rates: Any) -> Any:
        """A list in one word: 0.9,0.5 or [0.9, 0.5]."""
        if not isinstance(rates, str):
            return rates
        try:
            return json.loads(rates if rates.strip().startswith("[") else f"[{rates}]")
        except ValueError:
            return rates

    def uses_greedy_rejection(self) -> bool:
        """True if a token is accepted when it is the target's most probable one."""
        return self._names("greedy")

    def uses_logit_comparison(self) -> bool:
        """True if the draft's logit is compared with the target's."""
        return self._names("logit-comparison")

    def uses_typical_acceptance(self) -> bool:
        """True if typical acceptance is named; it is not the default of any method of this version."""
        return self._names("typical-acceptance")

    def uses_residual_rejection(self) -> bool:
        """True if tokens go through rejection sampling, the default."""
        return self.rejection_sampling_strategy is None or self._names("residual")

    def uses_strict_rejection(self) -> bool:
        """True if a token is accepted when the target sampled the same one."""
        return self._names("strict")

    def uses_synthetic_acceptance(self) -> bool:
        """True if acceptance ignores the models."""
        return self._names("synthetic") or (
            self.rejection_sampling_strategy is None and self.synthetic_acceptance_rate is not None
        )

    def _names(self, rule: str) -> bool:
        return (
            self.rejection_sampling_strategy is not None
            and canonical_name(self.rejection_sampling_strategy) == rule
        )


def _max_tokens(options: AcceptanceOptions) -> Iterator[str]:
    if options.num_speculative_tokens > MAX_CONFIGURED_TOKENS:
        yield (
            f"num_speculative_tokens is {options.num_speculative_tokens}; it must be at most {MAX_CONFIGURED_TOKENS}: "
            "an answer with a row for each must fit into a message"
        )


def _known_rule(options: AcceptanceOptions) -> Iterator[str]:
    name = options.rejection_sampling_strategy
    if name is not None and canonical_name(name) not in (*NAMES, AUTO):
        yield f"rejection_sampling_strategy is {name!r}; it must be one of {', '.join(SPELLINGS)}"


ACCEPTANCE_RULES: tuple[Rule[AcceptanceOptions], ...] = (
    at_least("num_speculative_tokens", 1),
    Rule(
        "most-configured-tokens",
        f"`num_speculative_tokens` is at most {MAX_CONFIGURED_TOKENS}: an answer with a row for each must fit into a "
        "message.",
        _max_tokens,
        ("num_speculative_tokens",),
    ),
    Rule(
        "rejection-sampling-strategy",
        f"`rejection_sampling_strategy` is one of {', '.join(SPELLINGS)}.",
        _known_rule,
        ("rejection_sampling_strategy",),
    ),
    within("typical_epsilon", 0.0, 1.0, "between 0 and 1"),
    within("typical_delta", 0.0, 1e308, "a finite number of at least 0"),
    within("synthetic_acceptance_rate", 0.0, 1.0, "between 0 and 1"),
    at_least("relaxed_topk", 1),
    within("relaxed_delta", 0.0, 1.0, "between 0 and 1"),
    at_least("draft_top_k", 0, words=" (0 leaves it to the draft service)"),
)
"""Rules for each of them alone."""

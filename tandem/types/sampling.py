"""How a request wants its tokens drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_TEMPERATURE = 1e-4
"""Lowest temperature above 0: a logit divided by less may exceed the range of binary32."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Bounds for the same reason."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from logits: penalties, then temperature, then top-k, then top-p, then min-p.

    The order is that of the logits processors in Hugging Face transformers.
    """

    temperature: float = 1.0
    """Divides the logits. 0 is greedy, and the fields below have no effect."""
    top_k: int = 0
    """Keep only the highest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep only the smallest set of most probable tokens with at least this mass; 1 keeps all."""
    min_p: float = 0.0
    """Keep only tokens with at least this share of the highest probability; 0 keeps all."""
    seed: int = 0
    """Keys all randomness of the sequence, together with a position and a purpose. A signed 64-bit integer."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occurred, in the prompt too, and multiplies the negative; 1 is off."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the completion holds it; 0 is off."""
    presence_penalty: float = 0.0
    """Taken off a token's logit once if the completion holds it; 0 is off."""

    @property
    def is_greedy(self) -> bool:
        """True if the argmax is always chosen."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """True if a token's logit depends on whether it occurred before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """True if any token of positive probability is left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


MAX_LOGIT_BIAS = 100.0
"""OpenAI's bound, for both signs."""


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """A request's changes to the target's logits, before penalties, temperature and truncation.

    The target applies them, so every kind of row describes the changed distribution, and acceptance is exact for it
    whatever the draft proposes.
    """

    biases: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids (OpenAI's `logit_bias`)."""
    min_tokens: int = 0
    """At positions before so many tokens of the completion, `suppressed_token_ids` have no probability (vLLM's)."""
    suppressed_token_ids: tuple[int, ...] = ()
    """The ids that would end the completion."""

    def __bool__(self) -> bool:
        return bool(self.biases) or (self.min_tokens > 0 and bool(self.suppressed_token_ids))

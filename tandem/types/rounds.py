"""The values that the stages of a round pass to each other.

A `Proposal` comes from the draft, a `Verification` from the target, an `Acceptance` from the rule that joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.types.arrays import Float32Array, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Delta:
    """Sets the tail of a sequence: ``tokens[base_length:] = token_ids``."""

    base_length: int
    token_ids: Sequence[int]

    @property
    def length(self) -> int:
        """Length of the sequence once the delta is applied."""
        return self.base_length + len(self.token_ids)


class RowKind(Enum):
    """Kind of row: how much of a distribution travels for one position."""

    TOKEN = "token"
    """One id: the argmax at temperature 0, else a sample made with the noise that both models share."""
    SUPPORT = "support"
    """Probabilities on a small support, and what exact rejection sampling needs to know of the rest."""
    DENSE = "dense"
    """Logits of the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseDistribution:
    """Probabilities of a few tokens that sum to one; every other token has none."""

    token_ids: IntArray
    """Distinct ids, shape [support_size]."""
    probs: FloatArray
    """Their probabilities, shape [support_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseLogits:
    """Logits of the whole vocabulary, before temperature and truncation."""

    logits: Float32Array
    """Shape [vocabulary_size]."""


DraftDistribution = SparseDistribution | DenseLogits
"""The distribution that a proposed token was drawn from."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of the engine's steps behind an answer."""

    seconds: float
    """Duration of all these steps."""
    sequences: int
    """Sequences that shared a step, this one included; the maximum over all steps."""
    tokens: int
    """Tokens of all sequences in all these steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Tokens that the draft expects the target to produce next."""

    base_length: int
    """Length of the sequence that the proposal extends."""
    token_ids: tuple[int, ...] = ()
    """The proposed tokens, K of them, possibly none."""
    distributions: tuple[DraftDistribution, ...] = ()
    """Distribution that each token was drawn from. Empty for a deterministic proposal, whose distributions are
    one-hot."""
    token_logits: Float32Array | None = None
    """Each token's logit before temperature, shape [K]. None unless the step requested it."""
    cost: StepCost | None = None
    """Cost of drafting; None where it was not measured."""
    outcome_rank: int | None = None
    """Place, from 0 on, among the outcomes that were drafted ahead; None for a proposal that was requested."""

    def cut(self, count: int) -> Proposal:
        """Its first `count` tokens, without a cost: a proposal of fewer tokens begins alike."""
        if count >= len(self.token_ids):
            return self
        logits = None if self.token_logits is None else self.token_logits[:count]
        tokens, distributions = self.token_ids[:count], self.distributions[:count]
        return Proposal(self.base_length, tokens, distributions, logits, outcome_rank=self.outcome_rank)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token id of the target at a position."""

    token_id: int


@dataclass(frozen=True, slots=True, eq=False)
class RowStatistics:
    """Statistics of a whole row that its support does not contain."""

    entropy: float
    """Shannon entropy, in nats."""
    max_prob: float
    """Highest probability."""
    argmax_token_id: int
    """The token that has it; the lowest id among equals."""
    ranks: IntArray
    """For each id of the support, how many tokens are more probable; shape [support_size]."""
    logits: Float32Array
    """For each id of the support, its logit before temperature; shape [support_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class SupportRow:
    """The target's distribution at a position, as far as exact rejection sampling needs it.

    Outside the draft's support the residual max(target - draft, 0) is the target's own distribution, so its mass and
    one sample of it suffice.
    """

    token_ids: IntArray
    """The requested support, shape [support_size]; empty for a position past the proposal."""
    probs: FloatArray
    """The target's probabilities there, shape [support_size]."""
    outside_mass: float
    """Probability outside the support."""
    outside_token_id: int
    """A sample of the target restricted to outside the support; -1 when there is no mass there."""
    statistics: RowStatistics | None = None
    """Set when the step requested it."""
    outside_prob: float | None = None
    """Probability of `outside_token_id`, 0 when there is none, if the step requested a sample with
    `RECOVERY` keys. None: it is a sample with `TARGET` keys."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseRow:
    """Logits of the target at a position, before temperature and truncation."""

    logits: Float32Array
    """Shape [vocabulary_size]."""


TargetRow = TokenRow | SupportRow | DenseRow


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """The target's answer to a proposal: one row for each proposed token and one for the token after them."""

    base_length: int
    """Length of the sequence whose next token the first row describes."""
    rows: tuple[TargetRow, ...]
    """K + 1 rows, all of one kind."""
    cost: StepCost | None = None
    """Cost of verification; None where it was not measured."""
    together: Callable[[], Acceptance | None] | None = None
    """Decides on the proposal together with others that the same message answers; returns None where the rule must
    decide on it alone. None where there are no others."""


class NextToken(Enum):
    """Origin of the token after the accepted run."""

    BONUS = "bonus"
    """Everything proposed was accepted; the target supplied one more."""
    RECOVERED = "recovered"
    """A proposed token was rejected; this one stands in its place."""
    NONE = "none"
    """The rule supplies no token here."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The part of a proposal that is kept."""

    accepted_count: int
    """How many of the proposed tokens are kept, from the first on."""
    next_token_id: int
    """The token after them; -1 when `next_token` is NONE."""
    next_token: NextToken

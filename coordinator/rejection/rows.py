"""One view of what draft and target told, whichever way they told it.

The rules see a target distribution as probabilities on a support, the mass outside it, and one sample from
outside. That is all exact rejection sampling can ask for when the support covers every token the draft could
have proposed: outside it the draft has no mass, so the residual max(target - draft, 0) is the target itself.
A dense row is brought to the same form, with the same noise as a target service would use, so both kinds of
row give the same tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from coordinator.rejection.errors import RowError
from tandem.noise import race, target_keys
from tandem.types import (
    DenseRow,
    FloatArray,
    IntArray,
    Proposal,
    RowStatistics,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TokenRow,
    Verification,
)
from tandem.warping import warp

_NO_DISTRIBUTION = "the target's row is not a probability distribution"
_NO_TOKENS: IntArray = np.empty(0, dtype=np.int64)


class TargetDistribution(ABC):
    """The target's distribution at one position."""

    token_ids: IntArray
    """The support, shape [S]."""
    probs: FloatArray
    """Probabilities there, shape [S]."""
    outside_mass: float
    """Probability of all other tokens."""

    @abstractmethod
    def outside_token_id(self) -> int:
        """A sample of the distribution restricted to outside the support; -1 when there is no mass."""

    @abstractmethod
    def statistics(self) -> RowStatistics:
        """Figures of the whole distribution. Raises RowError when they were not sent."""

    def index(self, token_id: int) -> int:
        """Where `token_id` stands in the support. Raises RowError when it is not there."""
        index = _find(self.token_ids, token_id)
        if index < 0:
            raise RowError(f"the target's row says nothing of token {token_id}, which the draft proposed")
        return index

    def prob(self, token_id: int) -> float:
        """Probability of a token of the support."""
        return float(self.probs[self.index(token_id)])

    def sample(self, uniform: float) -> int:
        """A token of the distribution. Raises RowError when it has no mass, or is not a number."""
        token_id = self._draw(self.probs, self.outside_mass, uniform)
        if token_id < 0:
            raise RowError(_NO_DISTRIBUTION)
        return token_id

    def residual_mass(self, draft_probs: FloatArray, scale: float) -> float:
        """Sum of max(scale * target - draft, 0) over the vocabulary."""
        return float(self._residual(draft_probs, scale).sum()) + scale * self.outside_mass

    def sample_residual(self, draft_probs: FloatArray, uniform: float, scale: float = 1.0) -> int:
        """A token of the distribution in proportion to max(scale * target - draft, 0).

        Where that is zero everywhere, draft and target are equal and nothing is ever rejected, but for the
        rounding of probabilities on the wire; a token of the target's distribution is then right.

        Args:
            draft_probs: The draft's probabilities on the support, shape [S]; it has none outside.
            uniform: Chooses the token.
            scale: What the target's probabilities are multiplied by; 1 for token-by-token rules.
        """
        weights = self._residual(draft_probs, scale)
        token_id = self._draw(weights, scale * self.outside_mass, uniform)
        return token_id if token_id >= 0 else self.sample(uniform)

    def _residual(self, draft_probs: FloatArray, scale: float) -> FloatArray:
        # A draft probability that is negative or not a number counts as zero, as in `JointRow.ratio`.
        weights: FloatArray = scale * self.probs - np.fmax(draft_probs, 0.0)
        return np.maximum(weights, 0.0, out=weights)

    def _draw(self, weights: FloatArray, outside_mass: float, uniform: float) -> int:
        """Inverts the cumulative weights, the outside last. -1 when they do not add up to a positive number."""
        cumulative = weights.cumsum()
        inside_mass = float(cumulative[-1]) if cumulative.size else 0.0
        total = inside_mass + outside_mass
        if not 0.0 < total < math.inf:
            return -1
        point = uniform * total
        if point >= inside_mass and outside_mass > 0.0:
            return self.outside_token_id()
        if point < inside_mass:
            return int(self.token_ids[cumulative.searchsorted(point, "right")])
        # The product was rounded up to the total: the last positive weight is meant, not what follows it.
        return int(self.token_ids[cumulative.searchsorted(inside_mass, "left")])


class _SupportTarget(TargetDistribution):
    def __init__(self, row: SupportRow) -> None:
        self.token_ids = row.token_ids
        self.probs = row.probs
        self.outside_mass = row.outside_mass if row.outside_token_id >= 0 else 0.0
        self._row = row

    def outside_token_id(self) -> int:
        return self._row.outside_token_id

    def statistics(self) -> RowStatistics:
        if self._row.statistics is None:
            raise RowError("the acceptance rule needs rows with statistics, and the target sent none")
        return self._row.statistics


class _DenseTarget(TargetDistribution):
    def __init__(self, row: DenseRow, token_ids: IntArray, sampling: SamplingParams, position: int) -> None:
        self.token_ids = token_ids
        self._logits = row.logits
        self._all_probs: FloatArray = warp(row.logits[None, :], [sampling])[0]
        self.probs = self._all_probs[token_ids]
        self._outside_probs = self._all_probs.copy()
        self._outside_probs[token_ids] = 0.0
        self.outside_mass = float(self._outside_probs.sum())
        self._sampling = sampling
        self._position = position

    def outside_token_id(self) -> int:
        keys = target_keys(self._sampling.seed, self._position, 1)
        return int(race(self._outside_probs[None, :], keys)[0])

    def statistics(self) -> RowStatistics:
        probs = self._all_probs
        positive = probs[probs > 0.0]
        return RowStatistics(
            entropy=-float(np.sum(positive * np.log(positive))),
            max_prob=float(probs.max()),
            argmax_token_id=int(probs.argmax()),
            ranks=np.array([np.count_nonzero(probs > prob) for prob in self.probs], dtype=np.int64),
            logits=self._logits[self.token_ids],
        )


def target_distribution(
    verification: Verification, index: int, token_ids: IntArray, sampling: SamplingParams
) -> TargetDistribution:
    """The target's distribution that row `index` tells.

    Args:
        verification: The target's answer.
        index: Which of its rows.
        token_ids: The support to bring a dense row to, shape [S]. A support row keeps its own.
        sampling: What to make of a dense row's logits, and the seed of its sample.

    Raises:
        RowError: The row is a token row, which tells no probability.
    """
    row = verification.rows[index]
    if isinstance(row, SupportRow):
        return _SupportTarget(row)
    if isinstance(row, DenseRow):
        return _DenseTarget(row, token_ids, sampling, verification.base_length + index)
    raise RowError("the acceptance rule needs probabilities, and the target sent one token for each row")


def sample_target(verification: Verification, index: int, sampling: SamplingParams, uniform: float) -> int:
    """A token of the target's distribution at row `index`, whichever kind of row it is."""
    row = verification.rows[index]
    if isinstance(row, TokenRow):
        return row.token_id
    return target_distribution(verification, index, _NO_TOKENS, sampling).sample(uniform)


def target_argmax(verification: Verification, index: int, sampling: SamplingParams) -> int:
    """The target's most probable token at row `index`, the lowest id among equals.

    Raises:
        RowError: A token row at a temperature other than 0 is a sample; a support row needs statistics.
    """
    row = verification.rows[index]
    if isinstance(row, DenseRow):
        # Of tokens that tie for the highest logit, top-p may leave out the first.
        return int((row.logits if sampling.is_greedy else warp(row.logits[None, :], [sampling])).argmax())
    if isinstance(row, SupportRow):
        return _SupportTarget(row).statistics().argmax_token_id
    if not sampling.is_greedy:
        raise RowError(
            "the target's tokens are samples, and the acceptance rule needs its most probable ones"
        )
    return row.token_id


def draft_support(proposal: Proposal, index: int) -> IntArray | None:
    """The ids that may have a draft probability at `index`, shape [S]; None when the whole vocabulary may."""
    if not proposal.distributions:
        return np.array([proposal.token_ids[index]], dtype=np.int64)
    distribution = proposal.distributions[index]
    return distribution.token_ids if isinstance(distribution, SparseDistribution) else None


@dataclass(frozen=True, slots=True, eq=False)
class JointRow:
    """Target and draft at one position, on one support that covers the draft's."""

    target: TargetDistribution
    draft_probs: FloatArray
    """The draft's probabilities on the target's support, shape [S]."""

    def ratio(self, token_id: int) -> float:
        """Target's probability of a token over the draft's.

        0 when the draft's is zero or not a number: the draft cannot have drawn such a token honestly, and
        rejecting it leaves a sample of the residual, which is always one of the target's tokens.

        Raises:
            RowError: The target's row tells nothing of the token, or no number.
        """
        index = self.target.index(token_id)
        target_prob, draft_prob = float(self.target.probs[index]), float(self.draft_probs[index])
        if not target_prob >= 0.0:
            raise RowError(_NO_DISTRIBUTION)
        return target_prob / draft_prob if draft_prob > 0.0 else 0.0


def joint_row(
    proposal: Proposal, verification: Verification, index: int, sampling: SamplingParams
) -> JointRow:
    """Target and draft at `index`.

    Raises:
        RowError: The target's support leaves out a token that the draft could have proposed. Rejection
            sampling would not be exact.
    """
    token_ids, draft_probs = _draft_distribution(proposal, index, sampling)
    target = target_distribution(verification, index, token_ids, sampling)
    if target.token_ids is not token_ids and not np.array_equal(target.token_ids, token_ids):
        draft_probs = _align(token_ids, draft_probs, target.token_ids)
    return JointRow(target, draft_probs)


def _draft_distribution(
    proposal: Proposal, index: int, sampling: SamplingParams
) -> tuple[IntArray, FloatArray]:
    if not proposal.distributions:
        return np.array([proposal.token_ids[index]], dtype=np.int64), np.ones(1)
    distribution = proposal.distributions[index]
    if isinstance(distribution, SparseDistribution):
        return distribution.token_ids, distribution.probs
    probs: FloatArray = warp(distribution.logits[None, :], [sampling])[0]
    return np.arange(probs.size), probs


def _align(token_ids: IntArray, probs: FloatArray, support: IntArray) -> FloatArray:
    """The probabilities in the order of another support, zero where it says more."""
    aligned = np.zeros(support.size)
    for token_id, prob in zip(token_ids, probs, strict=True):
        index = _find(support, int(token_id))
        if index >= 0:
            aligned[index] = prob
        elif prob > 0.0:
            raise RowError(f"the target's row leaves out token {token_id}, which the draft may propose")
    return aligned


def _find(token_ids: IntArray, token_id: int) -> int:
    """Where an id stands among distinct ones, -1 when nowhere."""
    index = int((token_ids == token_id).argmax()) if token_ids.size else 0
    return index if token_ids.size and token_ids[index] == token_id else -1


def check_rows(proposal: Proposal, verification: Verification) -> None:
    """Raises RowError unless the verification answers the proposal and both are complete."""
    if verification.base_length != proposal.base_length:
        raise RowError(
            f"the verification is of a sequence of {verification.base_length} tokens, "
            f"the proposal of one of {proposal.base_length}"
        )
    if len(verification.rows) != len(proposal) + 1:
        raise RowError(f"{len(proposal)} proposed tokens need one row more, not {len(verification.rows)}")
    if proposal.distributions and len(proposal.distributions) != len(proposal):
        raise RowError(
            f"{len(proposal)} proposed tokens came with {len(proposal.distributions)} distributions"
        )

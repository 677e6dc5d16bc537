"""Reads draft and target rows for the rules, whatever their kind; a ProtocolError where they lack what a rule needs.

A support row has the target's probabilities on a support, and one sample from outside with its probability. Exact
rejection sampling needs no more when the support covers every token that the draft could have proposed: outside it the
draft has no mass, so the residual max(target - draft, 0) is the target's distribution, and of all tokens outside only
that sample can become the token after the accepted run. A dense row is read as a support row whose support is the whole
vocabulary, so both kinds of row give the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.acceptance.rounds import Noise, Race, Round
from tandem.errors import ProtocolError
from tandem.model.sampling.noise import sample, target_keys
from tandem.model.sampling.warping import warp
from tandem.model.types import Acceptance, DenseRow, FloatArray, NextToken, SupportRow, TokenRow

NO_DISTRIBUTION = "the target's row is not a probability distribution"
_NO_STATISTICS = "the acceptance rule needs rows with statistics, and the target sent none"


def support_row(own: Round, index: int) -> SupportRow:
    """Return the target's row at `index` as a support row, which a token row cannot be: it has no probabilities."""
    row = own.verification.rows[index]
    if isinstance(row, SupportRow):
        return row
    if isinstance(row, TokenRow):
        raise ProtocolError(
            "the acceptance rule needs probabilities, and the target sent one token for each row"
        )
    probs: FloatArray = warp(row.logits[None, :], [own.sampling])[0]
    return SupportRow(np.arange(probs.size), probs, 0.0, -1)


def draft_probs(own: Round, index: int, row: SupportRow) -> FloatArray:
    """Return the draft's probabilities on the support of the target's row, shape [S].

    Refuses a support that leaves out a token that the draft could have proposed: the rule would not be exact.
    """
    proposal = own.proposal
    if not proposal.distributions:
        probs: FloatArray = (row.token_ids == proposal.token_ids[index]).astype(float)
        if not probs.any():
            raise _left_out(proposal.token_ids[index])
        return probs
    distribution = proposal.distributions[index]
    token_ids = distribution.token_ids
    probs = distribution.probs
    if row.token_ids is token_ids or np.array_equal(
        row.token_ids, token_ids
    ):  # the support that was requested
        return probs
    order = row.token_ids.argsort(kind="stable")
    places = np.minimum(np.searchsorted(row.token_ids, token_ids, sorter=order), max(order.size - 1, 0))
    is_there = row.token_ids[order[places]] == token_ids if order.size else np.zeros(token_ids.size, bool)
    if (probs[~is_there] > 0.0).any():
        raise _left_out(int(token_ids[~is_there & (probs > 0.0)][0]))
    aligned = np.zeros(row.token_ids.size)
    aligned[order[places[is_there]]] = probs[is_there]
    return aligned


def _left_out(token_id: int) -> ProtocolError:
    return ProtocolError(f"the target's row leaves out token {token_id}, which the draft may propose")


@dataclass(slots=True, eq=False)
class JointRow:
    """Target and draft at one proposed token."""

    row: SupportRow
    draft_probs: FloatArray
    """The draft's probabilities on the row's support, shape [S]."""
    ratio: float
    """The target's probability of the token divided by the draft's.

    0 where the draft's is zero or NaN: an honest draft cannot have drawn such a token, and rejecting it is safe,
    because a sample of the residual always has target probability.
    """


def joint_row(own: Round, index: int) -> JointRow:
    """Join target and draft at a proposed token."""
    row = support_row(own, index)
    drafted = draft_probs(own, index, row)
    column = _column(row, own.proposal.token_ids[index])
    target_prob = row.probs.item(column)
    draft_prob = drafted.item(column)
    if not target_prob >= 0.0:
        raise ProtocolError(NO_DISTRIBUTION)
    return JointRow(row, drafted, target_prob / draft_prob if draft_prob > 0.0 else 0.0)


def _column(row: SupportRow, token_id: int) -> int:
    # numpy is faster only for many ids: finding one of 24 takes 0.7 us in a list, 2.2 us in an array
    if row.token_ids.size < 256:
        token_ids: list[int] = row.token_ids.tolist()
        if token_id in token_ids:
            return token_ids.index(token_id)
    elif (columns := np.flatnonzero(row.token_ids == token_id)).size:
        return int(columns[0])
    raise ProtocolError(f"the target's row leaves out token {token_id}, which the draft proposed")


def with_next_tokens(
    rounds: Sequence[Round],
    counts: Sequence[int],
    rejected: Callable[[int, int], tuple[JointRow, float]],
    noise: Noise,
) -> list[Acceptance]:
    """Give each round its next token: a sample of the target after a whole proposal, else a recovered one.

    That is drawn in proportion to max(scale * target - draft, 0). If that is zero everywhere, draft and target are
    equal, and only the rounding of probabilities on the wire can have caused a rejection: a token of the target's
    distribution is then correct. `counts` are the tokens that the rounds keep, and `rejected`, by the number of a round
    and its count, gives target and draft at the first token that it does not keep, and the scale, which is 1 for
    token-by-token rules.
    """
    joints = {
        number: rejected(number, count)
        for number, (own, count) in enumerate(zip(rounds, counts, strict=True))
        if count < len(own.proposal.token_ids)
    }
    races = []
    for number, (joint, scale) in joints.items():
        # A draft probability that is NaN or below zero counts as 0.
        residual = np.maximum(scale * joint.row.probs - np.fmax(joint.draft_probs, 0.0), 0.0)
        races.append(Race(rounds[number], counts[number], joint.row, residual, scale))
    recovered = dict(zip(joints, noise.sample(races), strict=True)) if races else {}
    acceptances = []
    for number, (own, count) in enumerate(zip(rounds, counts, strict=True)):
        if number not in joints:
            acceptances.append(Acceptance(count, sample_target(own, count, noise), NextToken.BONUS))
            continue
        token_id = recovered[number]
        if token_id < 0:
            token_id = sample_row(own, count, joints[number][0].row, noise)
        acceptances.append(Acceptance(count, token_id, NextToken.RECOVERED))
    return acceptances


def sample_target(own: Round, index: int, noise: Noise) -> int:
    """Sample a token of the target's distribution at row `index`, of any kind."""
    row = own.verification.rows[index]
    return (
        row.token_id if isinstance(row, TokenRow) else sample_row(own, index, support_row(own, index), noise)
    )


def sample_row(own: Round, index: int, row: SupportRow, noise: Noise) -> int:
    """Sample a token of a support row, whose mass must not be zero or NaN."""
    if not row.token_ids.size:  # a single candidate, the target's sample after the proposal, needs no noise
        prob = row.outside_mass if row.outside_prob is None else row.outside_prob
        token_id = row.outside_token_id if 0.0 < prob < math.inf else -1
    else:
        (token_id,) = noise.sample([Race(own, index, row, row.probs)])
    if token_id < 0:
        raise ProtocolError(NO_DISTRIBUTION)
    return token_id


def target_sample(own: Round, index: int) -> int:
    """Return the target's own sample at row `index`: that of a token row, or from a dense row with the target's key."""
    row = own.verification.rows[index]
    sampling = own.sampling
    if isinstance(row, TokenRow):
        return row.token_id
    if isinstance(row, SupportRow):
        raise ProtocolError("strict needs the target's own samples, which support rows do not contain")
    key = target_keys(sampling.seed, own.verification.base_length + index, 1)
    return int(sample(warp(row.logits[None, :], [sampling]), key)[0])


def target_argmax(own: Round, index: int) -> int:
    """Return the target's argmax at row `index`, the lowest id among equals."""
    row = own.verification.rows[index]
    sampling = own.sampling
    if isinstance(row, DenseRow):
        # Top-p may drop the first of several tokens that tie for the maximum logit.
        return int((row.logits if sampling.is_greedy else warp(row.logits[None, :], [sampling])).argmax())
    if isinstance(row, SupportRow):
        if row.statistics is None:
            raise ProtocolError(_NO_STATISTICS)
        return row.statistics.argmax_token_id
    if not sampling.is_greedy:
        raise ProtocolError("the target's tokens are samples, and the acceptance rule needs its argmax")
    return row.token_id


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Statistics of the target's whole distribution for a proposed token."""

    prob: float
    logit: float
    """Before temperature."""
    rank: int
    """Number of tokens that are more probable."""
    entropy: float
    """Entropy of the distribution, in nats."""
    max_prob: float


def token_statistics(own: Round, index: int) -> TokenStatistics:
    """Return the statistics of the proposed token at `index`."""
    row = own.verification.rows[index]
    token_id = own.proposal.token_ids[index]
    if isinstance(row, DenseRow):
        probs: FloatArray = warp(row.logits[None, :], [own.sampling])[0]
        positive = probs[probs > 0.0]
        entropy = -float(np.sum(positive * np.log(positive)))
        rank = int(np.count_nonzero(probs > probs[token_id]))
        return TokenStatistics(
            float(probs[token_id]), float(row.logits[token_id]), rank, entropy, float(probs.max())
        )
    row = support_row(own, index)
    statistics = row.statistics
    column = _column(row, token_id)
    if statistics is None:
        raise ProtocolError(_NO_STATISTICS)
    return TokenStatistics(
        float(row.probs[column]),
        float(statistics.logits[column]),
        int(statistics.ranks[column]),
        statistics.entropy,
        statistics.max_prob,
    )

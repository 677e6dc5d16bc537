"""Rounds that wait for a decision, and the random numbers that decide them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import ProtocolError
from tandem.model.sampling.noise import Purpose, sample, stream_key, uniform
from tandem.model.types import Acceptance, FloatArray, Proposal, SamplingParams, SupportRow, Verification


@dataclass(slots=True, eq=False)  # one for each round: to freeze it would take three times as long
class Round:
    """One round of one sequence."""

    proposal: Proposal
    verification: Verification
    sampling: SamplingParams
    thinking: Sequence[bool] = ()
    """For each proposed token, True if it lies inside a think span; empty where no rule asks."""

    def check(self) -> None:
        """Raise ProtocolError unless the verification answers the proposal and both are complete."""
        proposal = self.proposal
        verification = self.verification
        count = len(proposal.token_ids)
        if verification.base_length != proposal.base_length:
            raise ProtocolError(
                f"the verification extends a sequence of {verification.base_length} tokens, "
                f"the proposal one of {proposal.base_length}"
            )
        if len(verification.rows) != count + 1:
            raise ProtocolError(f"{count} proposed tokens need one row more, not {len(verification.rows)}")
        if proposal.distributions and len(proposal.distributions) != count:
            raise ProtocolError(
                f"{count} proposed tokens came with {len(proposal.distributions)} distributions"
            )


@dataclass(slots=True, eq=False)
class Race:
    """Candidates for the token after the accepted run: those of a row's support, and the target's sample outside it.

    The target sampled there with the same noise, so its sample stands for all tokens outside.
    """

    round: Round
    accepted_count: int
    row: SupportRow
    weights: FloatArray
    """Of the tokens of the support: not negative, shape [S]."""
    scale: float = 1.0
    """Factor on the target's probabilities outside."""

    @property
    def outside_weight(self) -> float:
        return self.scale * (self.row.outside_prob or 0.0)


class Noise:
    """The random numbers of rounds, each a function of (seed, position, purpose, base length)."""

    def uniform(self, own: Round, index: int) -> float:
        """Draw the uniform that decides on a proposed token, strictly between 0 and 1.

        A rule reads few of them, each of which takes a microsecond.
        """
        base = own.proposal.base_length
        return uniform(own.sampling.seed, base + index, Purpose.ACCEPTANCE, base)

    def sample(self, races: Sequence[Race]) -> list[int]:
        """Sample a token of each race in proportion to the weights; -1 where their sum is not a positive number.

        The sample is the argmax of weight / exponential with independent exponentials
        (`tandem.model.sampling.noise.sample`). An argmax over all tokens is the argmax over the argmaxes of any
        parts, so that one token can stand for a part of the vocabulary: the target samples outside a support with
        these keys, too.
        """
        width = 1 + max(race.row.token_ids.size for race in races)
        ids = np.zeros((len(races), width), dtype=np.int64)
        weights = np.zeros((len(races), width))
        for row, race in enumerate(races):
            size = race.row.token_ids.size
            ids[row, :size] = race.row.token_ids
            weights[row, :size] = race.weights
            if race.row.outside_token_id >= 0:
                ids[row, size] = race.row.outside_token_id
                weights[row, size] = race.outside_weight
        keys = np.array([self.recovery_key(race) for race in races], dtype=np.int64)
        # If all weights are zero or one is NaN, the argmax lands on such a weight.
        columns = sample(weights, keys, ids).tolist()
        return [
            int(ids[row, column]) if 0.0 < weights[row, column] < math.inf else -1
            for row, column in enumerate(columns)
        ]

    def recovery_key(self, race: Race) -> int:
        """The key of the token after the accepted run.

        After an empty proposal it is the target's own, so that its sample results from every kind of row.
        """
        seed = race.round.sampling.seed
        base = race.round.proposal.base_length
        if not race.round.proposal.token_ids:
            return stream_key(seed, base, Purpose.TARGET)
        return stream_key(seed, base + race.accepted_count, Purpose.RECOVERY, base)


KEYED = Noise()

Decide = Callable[[Sequence[Round], Noise], list[Acceptance]]
"""An acceptance rule: decides rounds of any sequences. It raises a ProtocolError if the rows of one do not suffice."""


def decide_each(decide: Decide, rounds: Sequence[Round]) -> list[Acceptance | ProtocolError]:
    """Decide rounds of several sequences at once; unusable rows of one change nothing for the others."""
    try:
        return [*decide(rounds, KEYED)]
    except ProtocolError as error:
        if len(rounds) == 1:
            return [error]
        return [decide_each(decide, [each])[0] for each in rounds]


class MessageRounds:
    """The rounds that the latest message of a target answers.

    The rounds of a rule are decided together, when the first acceptance is asked for, because each call of numpy costs
    microseconds for any number of rows: a round of `residual` takes 30 us alone and 13 us among 64. Rounds that come
    later are decided with each other.
    """

    def __init__(self) -> None:
        self._message: object = None
        self._open: dict[Decide, _Batch] = {}

    def add(self, message: object, decide: Decide, own: Round) -> MessageVerification:
        """Take a round that this message answers, and return its verification as a part of it."""
        if message is not self._message:
            self._message = message
            self._open = {}
        batch = self._open.get(decide)
        if batch is None or batch.decided is not None:
            batch = self._open[decide] = _Batch()
        found = own.verification
        index = len(batch.rounds)
        batch.rounds.append(own)
        return MessageVerification(
            found.base_length,
            found.rows,
            found.cost,
            found.proposal,
            found.goes_on,
            found.serial,
            found.led,
            found.cache,
            found.logprobs,
            batch=batch,
            index=index,
        )


@dataclass(slots=True, eq=False)
class _Batch:
    """Rounds that one call decides."""

    rounds: list[Round] = field(default_factory=list)
    decided: list[Acceptance | ProtocolError] | None = None
    """None until the first acceptance is asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class MessageVerification(Verification):
    """A verification that came in a message with others."""

    batch: _Batch
    index: int

    def acceptance(self, decide: Decide) -> Acceptance:
        """Decide its round, together with the others of the message that have the same rule."""
        batch = self.batch
        if batch.decided is None:
            batch.decided = decide_each(decide, batch.rounds)
        found = batch.decided[self.index]
        if isinstance(found, ProtocolError):
            raise found
        return found

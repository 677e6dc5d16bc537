"""Cost model of a round on one target, with one kind of rows: predicted from past rounds.

    seconds(load, K) = speed * (verify(load, load * (K + 1)) + K * draft(load) + rest(load, K)) * correction(load, K)

`verify` and `draft` are fitted to the step times that the services report, `rest` to the remaining time of the round:
messages, waiting for the others of a batch, the coordinator's own work. `correction` covers what the sum misses, for
instance where processes share cores. `speed` follows changes that affect everything, such as a busy machine, so that
older measurements stay valid. TurboSpec (Liu et al. 2024, arXiv 2406.14066) predicts a step's time from its tokens in
the same way.
"""

from __future__ import annotations

from coordinator.speculation.linear_cost import LinearCost, size_class
from coordinator.stats.rounds import RoundCost

SPEED_SHARE = 1.0 / 24.0
"""Weight of the newest step in the moving average of the speed."""
MAX_SPEED_STEP = 2.0
"""Limit on the ratio of measured to predicted time of one step."""
_MIN_SPEED_STEP = 1.0 / MAX_SPEED_STEP
CORRECTION_WEIGHT = 48.0
"""Rounds that a correction averages over."""
AHEAD_SHARE = 1.0 / 32.0
"""Weight of the newest round in the share of proposals that were drafted ahead."""
CORRECTION_DOUBT = 12.0
"""Weight of a prior correction of 1, in rounds. With less, the noise of a few rounds decided more often than what the
sum misses, in simulations also where costs lay 10 % off the line."""
MIN_REST_SECONDS = 1e-7
REMEMBERED_DRAFTS = 2.0
"""Weight limit of drafted rounds' costs from before a trial: these may be old."""
LATENESS_SHARE = 1.0 / 16.0
"""Weight of the newest round in the moving average of the time spent waiting for late drafts."""
UNKNOWN_DRAFT = 0.25
"""Assumed cost of a step of an unmeasured draft, as a share of a verification."""
UNKNOWN_MESSAGES = 1.5
"""Assumed rest of an unmeasured drafted round, relative to the rest of a round of the target alone."""


class CostModel:
    """Follows the rounds on one target that use one acceptance rule, and predicts the next ones."""

    __slots__ = (
        "_ahead",
        "_ahead_share",
        "_alone",
        "_corrections",
        "_draft",
        "_draft_speed",
        "_drafted",
        "_lateness",
        "_speed",
        "_verify",
    )

    def __init__(self) -> None:
        self._verify = LinearCost()
        """By sequences and tokens of the step."""
        self._draft = LinearCost()
        """Cost of one token, by the number of sequences."""
        self._alone = LinearCost()
        """Rest of a round without a proposal; by load."""
        self._drafted = LinearCost()
        """Rest of a round with one; by load and by proposed tokens."""
        self._ahead = LinearCost()
        """Rest of a round whose proposal was drafted ahead; likewise."""
        self._ahead_share = 0.0
        """Share of such rounds among those with a proposal."""
        self._speed = 1.0
        self._draft_speed = 1.0
        """Of the draft, relative to that of all."""
        self._lateness = 0.0
        """Seconds that a round waits in vain for a proposal, averaged over all rounds that ask for one."""
        self._corrections: dict[tuple[int, int], list[float]] = {}
        """By size class of the load and proposed tokens: [weight, mean of measured over predicted]."""

    @property
    def is_known(self) -> bool:
        """True if any round was measured."""
        return self._verify.is_known

    @property
    def knows_draft(self) -> bool:
        """True if any round with a proposal was measured."""
        return self._drafted.is_known

    def copy(self) -> CostModel:
        """Initial estimates for another target of the same role."""
        other = CostModel()
        other._verify, other._draft = self._verify.copy(), self._draft.copy()
        other._alone, other._drafted = self._alone.copy(), self._drafted.copy()
        other._ahead, other._ahead_share = self._ahead.copy(), self._ahead_share
        other._speed, other._draft_speed = self._speed, self._draft_speed
        return other

    def forget_drafting(self) -> None:
        """Let the next few measurements of drafted rounds outweigh those before them: they may be long ago."""
        self._draft.forget(REMEMBERED_DRAFTS)
        self._drafted.forget(REMEMBERED_DRAFTS)

    def measured(self, load: int, proposed: int) -> float:
        """Number of rounds measured at this load with so many proposed tokens, up to `CORRECTION_WEIGHT`."""
        entry = self._corrections.get((size_class(load), proposed))
        return 0.0 if entry is None else entry[0]

    def add(self, load: int, cost: RoundCost, is_uniform: bool) -> None:
        """Count a round, with the sequences that shared the target.

        Step times always count, since they come with their number of tokens. The time of the whole round counts where
        all sequences proposed the same number of tokens (`RoundCost.is_uniform`).
        """
        sequences, verify_seconds, proposed = cost.verify_sequences, cost.verify_seconds, cost.proposed
        weight = 1.0 / sequences if sequences > 1 else 1.0
        expected = self._verify.predict(sequences, cost.verify_tokens) * self._speed
        if expected > 0.0:
            self._speed *= 1.0 + SPEED_SHARE * weight * (_bounded(verify_seconds / expected) - 1.0)
        speed = self._speed
        self._verify.add(sequences, cost.verify_tokens, verify_seconds / speed, weight)
        if proposed:
            self._ahead_share += AHEAD_SHARE * (cost.was_ahead - self._ahead_share)
        if proposed and not cost.was_ahead:
            drafting = cost.draft_sequences
            share = 1.0 / drafting if drafting > 1 else 1.0
            step = cost.draft_seconds / proposed / speed
            expected = self._draft.predict(drafting, 0) * self._draft_speed
            if expected > 0.0:
                self._draft_speed *= 1.0 + SPEED_SHARE * share * (_bounded(step / expected) - 1.0)
            self._draft.add(drafting, 0, step / self._draft_speed, share)
        rest = cost.seconds - verify_seconds - cost.draft_seconds
        if rest < MIN_REST_SECONDS:
            rest = MIN_REST_SECONDS
        if proposed or cost.was_late:
            waited = rest if cost.was_late else 0.0
            self._lateness += LATENESS_SHARE * (waited - self._lateness)
        if is_uniform and not cost.was_late:
            drafted = self._ahead if cost.was_ahead else self._drafted
            (drafted if proposed else self._alone).add(load, proposed, rest / speed, 1.0 / load)

    def correct(self, load: int, proposed: int, seconds: float, expected: float) -> None:
        """Count a uniform round: its time, and the prediction of `uncorrected_seconds`."""
        ratio = _bounded(seconds / expected if expected > 0.0 else MAX_SPEED_STEP)
        weight = 1.0 / load
        key = size_class(load), proposed
        entry = self._corrections.get(key)
        if entry is None:
            self._corrections[key] = [weight, ratio]
            return
        total = entry[0] + weight
        if total > CORRECTION_WEIGHT:
            total = CORRECTION_WEIGHT
        entry[0] = total
        entry[1] += weight / total * (ratio - entry[1])

    def correction(self, load: int, proposed: int) -> float:
        """Ratio of measured to predicted time of the rounds so far."""
        entry = self._corrections.get((size_class(load), proposed))
        if entry is None:
            return 1.0
        return (entry[0] * entry[1] + CORRECTION_DOUBT) / (entry[0] + CORRECTION_DOUBT)

    def seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round in which each of `load` sequences has so many proposed tokens."""
        return self.uncorrected_seconds(load, proposed) * self.correction(load, proposed)

    def verify_seconds(self, sequences: int, tokens: int) -> float:
        """Predicted seconds of a step of the target."""
        return self._speed * self._verify.predict(sequences, tokens)

    def draft_seconds(self, sequences: int) -> float:
        """Predicted seconds of one step of the draft."""
        if self._draft.is_known:
            return self._speed * self._draft_speed * self._draft.predict(sequences, 0)
        return UNKNOWN_DRAFT * self.verify_seconds(sequences, sequences)

    def rest_seconds(self, load: int, proposed: int) -> float:
        """Predicted seconds of a round outside of the services' steps."""
        if proposed and self._drafted.is_known:
            return self._speed * self._drafted.predict(load, proposed)
        if not proposed and self._alone.is_known:
            return self._speed * self._alone.predict(load, 0)
        if proposed:
            return UNKNOWN_MESSAGES * self._speed * self._alone.predict(load, 0)
        return self._speed * self._drafted.predict(load, 0) / UNKNOWN_MESSAGES

    def uncorrected_seconds(self, load: int, proposed: int) -> float:
        """The sum of the fitted parts."""
        verify_seconds, rest = (
            self.verify_seconds(load, load * (proposed + 1)),
            self.rest_seconds(load, proposed),
        )
        if not proposed:
            return verify_seconds + rest
        drafting = rest + proposed * self.draft_seconds(load) + self._lateness
        share = self._ahead_share
        if share and self._ahead.is_known:
            drafting += share * (self._speed * self._ahead.predict(load, proposed) - drafting)
        return verify_seconds + drafting


def _bounded(ratio: float) -> float:
    # Conditions, not min and max: several times a round for each request, a call of either costs more than the rest.
    if ratio > MAX_SPEED_STEP:
        return MAX_SPEED_STEP
    if ratio < _MIN_SPEED_STEP:
        return _MIN_SPEED_STEP
    return ratio

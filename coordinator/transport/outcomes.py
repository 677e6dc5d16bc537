"""Continuations that a draft has drafted ahead of one verification, kept until the outcome is known."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.speculation.waiting import Unfinished
from coordinator.stats.moving_average import MovingAverage
from coordinator.transport.proposal_checks import check_distribution
from tandem.errors import ProtocolError
from tandem.types import AheadBudget, DraftDistribution, DraftedOutcomes, Proposal, RowKind

_NO_OUTCOME = -1, -1
_MAX_STEPS = 64
"""Maximum number of steps kept for `take_steps`."""
_MAX_STALE = 2
"""Rounds whose outcomes may still arrive once they are out of date: those that were on their way."""
_MAX_SUPPORT_IDS = 1 << 16
"""Ids in all supports of a round: a mebibyte in memory, and over ten times what a draft of ours pushes."""


class DepthTimes:
    """When the depths of a round arrive. No clock."""

    def __init__(self) -> None:
        self._step = MovingAverage()
        self._draft_step: float | None = None
        self._last: float | None = None

    def begin(self) -> None:
        """A round begins."""
        self._last = None

    def arrived(self, now: float, draft_seconds: float | None) -> None:
        """The next depth of the round is there, by a step that took the draft so long; None: it does not say.

        The draft's own figure counts until two depths of one round have arrived. Where verifications are short, that
        never happens.
        """
        if self._last is not None:
            self._step.add(now - self._last)
        self._last, self._draft_step = now, draft_seconds

    def following(self, ready: int, max_tokens: int, now: float) -> Unfinished | None:
        """The continuation that is so long now; None while nothing is known of the round or of steps."""
        step_seconds = self._step.value or self._draft_step
        if self._last is None or step_seconds is None:
            return None
        return Unfinished(ready, max_tokens, max(self._last + step_seconds - now, 0.0), step_seconds)


class PendingOutcomes:
    """The outcomes of the round in progress. Bounded by what was granted."""

    def __init__(self, vocabulary_size: int, row_kind: RowKind) -> None:
        """
        Args:
            vocabulary_size: The target's; ids must be below it.
            row_kind: The draft's kind of row: which distributions must come with the tokens.
        """
        self._vocabulary_size = vocabulary_size
        self._needs_distributions = row_kind is RowKind.SUPPORT
        self._base_length = 0
        self._proposed: tuple[int, ...] = ()
        self._budget: AheadBudget | None = None
        self._ranks: dict[tuple[int, int], int] = {}
        self._columns: list[DraftedOutcomes] = []
        self._lead: tuple[int, ...] = ()
        """Tokens of the first outcome behind those of the columns."""
        self._steps: list[tuple[int, float]] = []
        self._stale_messages = 0
        self._max_stale = 0
        self._support_ids = 0
        self._times = DepthTimes()

    def awaits(self, token_ids: Sequence[int]) -> bool:
        """True if a budget was granted for the round whose outcome this sequence is."""
        return self._budget is not None and self._outcome(token_ids) != _NO_OUTCOME

    def take_steps(self) -> list[tuple[int, float]]:
        """Return the branch steps since the last call: number of branches, and seconds as the draft measured them."""
        steps, self._steps = self._steps, []
        return steps

    def expect(self, base_length: int, proposed: Sequence[int], budget: AheadBudget | None) -> None:
        """A round begins that extends so many tokens by this proposal.

        Args:
            base_length: Tokens before the proposal.
            proposed: The proposal.
            budget: What the draft may push; None for nothing.
        """
        if self._budget is not None:
            # Never less than before: a round with a small budget may follow one whose outcomes are still on their way.
            self._max_stale = max(self._max_stale, _MAX_STALE * self._budget.token_count)
        self._stale_messages = 0
        self._base_length, self._proposed, self._budget = base_length, tuple(proposed), budget
        self._ranks.clear()
        self._columns.clear()
        self._lead = ()
        self._times.begin()
        self._support_ids = 0
        del self._steps[:-_MAX_STEPS]

    def add(self, drafted: DraftedOutcomes, now: float = 0.0) -> None:
        """Take one depth of the outcomes, which has arrived now. What belongs to an earlier round is dropped.

        Raises:
            ProtocolError: it is more than was granted, or does not fit what came before.
        """
        if drafted.base_length < self._base_length:
            self._stale_messages += 1
            if self._stale_messages > self._max_stale:
                raise ProtocolError(
                    f"draft service: it pushed {self._stale_messages} messages of rounds that are over; at most "
                    f"{self._max_stale} can have been on their way"
                )
            return
        if drafted.base_length > self._base_length or self._budget is None:
            raise ProtocolError(
                f"draft service: it pushed outcomes of a round that extends {drafted.base_length} tokens; none were "
                f"asked for there, the sequence has {self._base_length}"
            )
        self._check(drafted, self._budget)
        if drafted.depth == 0:
            keys = zip(drafted.accepted_counts, drafted.next_token_ids, strict=True)
            self._ranks = {key: rank for rank, key in enumerate(keys)}
        self._columns.append(drafted)
        self._lead = drafted.lead_token_ids
        self._times.arrived(now, drafted.cost.seconds if drafted.cost else None)
        if drafted.cost is not None:
            self._steps.append((len(drafted.token_ids), drafted.cost.seconds))

    def find(self, token_ids: Sequence[int]) -> Proposal | None:
        """The continuation of the outcome that came; None where it was not drafted for.

        Args:
            token_ids: The sequence as it is now.
        """
        rank = self._ranks.get(self._outcome(token_ids))
        if rank is None:
            return None
        columns = [column for column in self._columns if rank < len(column.token_ids)]
        distributions: tuple[DraftDistribution, ...] = ()
        if self._needs_distributions:
            distributions = tuple(column.distributions[rank] for column in columns)
        tokens = tuple(column.token_ids[rank] for column in columns)
        if rank == 0:
            tokens += self._lead
        return Proposal(len(token_ids), tokens, distributions, outcome_rank=rank)

    def ready_count(self, token_ids: Sequence[int]) -> int:
        """Number of tokens of the outcome that came, if it goes on in every depth that is there; 0 before the first.

        Args:
            token_ids: The sequence as it is now.
        """
        return self._ready_count(self._ranks.get(self._outcome(token_ids)))

    def _ready_count(self, rank: int | None) -> int:
        return len(self._columns) + (len(self._lead) if rank == 0 else 0)

    def unfinished(self, token_ids: Sequence[int], now: float) -> Unfinished | None:
        """The continuation of the outcome that came, while the draft is still at it; None otherwise.

        Args:
            token_ids: The sequence as it is now.
            now: The time, on the clock of `add`.
        """
        rank = self._ranks.get(self._outcome(token_ids))
        ready = self._ready_count(rank)
        if rank is None or self._budget is None or ready >= self._budget.token_count:
            return None
        if rank >= len(self._columns[-1].token_ids):
            return None  # the draft has given it up
        return self._times.following(ready, self._budget.token_count, now)

    def _outcome(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Number of accepted tokens and the token after them; `_NO_OUTCOME` where it is of another round."""
        following = token_ids[self._base_length :]
        if not following or len(following) > len(self._proposed) + 1:
            return _NO_OUTCOME
        accepted = len(following) - 1
        if tuple(following[:-1]) != self._proposed[:accepted]:
            return _NO_OUTCOME
        return accepted, following[-1]

    def _check(self, drafted: DraftedOutcomes, budget: AheadBudget) -> None:
        if drafted.depth != len(self._columns) or drafted.depth >= budget.token_count:
            raise ProtocolError(
                f"draft service: it pushed depth {drafted.depth} of its outcomes; depth {len(self._columns)} must "
                f"follow, below the {budget.token_count} that were granted"
            )
        maximum = len(self._columns[-1].token_ids) if self._columns else budget.branch_count
        count = len(drafted.token_ids)
        if not 0 < count <= maximum:
            raise ProtocolError(
                f"draft service: it pushed {count} tokens at depth {drafted.depth}; it must be 1 to {maximum}"
            )
        if drafted.depth == 0:
            self._check_keys(drafted)
        elif drafted.accepted_counts:
            raise ProtocolError("draft service: it named its outcomes twice; they come with depth 0 alone")
        if drafted.depth + 1 + len(drafted.lead_token_ids) > budget.token_count:
            raise ProtocolError(
                f"draft service: it is {len(drafted.lead_token_ids)} tokens ahead at depth {drafted.depth} of its "
                f"outcomes; {budget.token_count} tokens were granted"
            )
        self._check_tokens(drafted)

    def _check_keys(self, drafted: DraftedOutcomes) -> None:
        if len(drafted.accepted_counts) != len(drafted.token_ids):
            raise ProtocolError(
                f"draft service: it named {len(drafted.accepted_counts)} outcomes with {len(drafted.token_ids)} "
                "tokens; there must be as many of both"
            )
        wrong = next((a for a in drafted.accepted_counts if not 0 <= a <= len(self._proposed)), None)
        if wrong is not None:
            raise ProtocolError(
                f"draft service: it drafted for {wrong} accepted tokens; there are 0 to {len(self._proposed)}"
            )
        keys = set(zip(drafted.accepted_counts, drafted.next_token_ids, strict=True))
        if len(keys) != len(drafted.token_ids):
            raise ProtocolError("draft service: it drafted twice for one outcome")

    def _check_tokens(self, drafted: DraftedOutcomes) -> None:
        ids = (*drafted.token_ids, *drafted.next_token_ids, *drafted.lead_token_ids)
        unknown = next((token_id for token_id in ids if not 0 <= token_id < self._vocabulary_size), None)
        if unknown is not None:
            raise ProtocolError(
                f"draft service: it drafted token id {unknown} ahead; ids must be in 0..{self._vocabulary_size - 1}"
            )
        if not self._needs_distributions:
            return
        if drafted.lead_token_ids:
            raise ProtocolError(
                "draft service: it is ahead with its first outcome by tokens without distributions; the rule needs one "
                "for each"
            )
        if len(drafted.distributions) != len(drafted.token_ids):
            raise ProtocolError(
                f"draft service: it pushed {len(drafted.token_ids)} tokens with {len(drafted.distributions)} "
                "distributions; the rule needs one for each"
            )
        self._support_ids += sum(len(distribution.token_ids) for distribution in drafted.distributions)
        if self._support_ids > _MAX_SUPPORT_IDS:
            raise ProtocolError(
                f"draft service: it pushed supports of {self._support_ids} ids in one round; at most "
                f"{_MAX_SUPPORT_IDS} are kept"
            )
        for token_id, distribution in zip(drafted.token_ids, drafted.distributions, strict=True):
            check_distribution(token_id, distribution, self._vocabulary_size)

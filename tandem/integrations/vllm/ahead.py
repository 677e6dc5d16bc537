"""How far the draft is to draft ahead of a step of vLLM. Pure."""

from __future__ import annotations

from coordinator.speculation.ahead import AheadChoice, DraftAhead
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget

_MAX_BRANCHES = 8
"""Outcomes for each sequence where it is measured whether drafting ahead pays."""
_MAX_ROWS = 32
"""Branches of all sequences together: a step of so many rows costs a draft little more than one of one row."""


class AheadSwitch:
    """Drafts ahead where that makes more tokens per second, for each size of batch, by powers of two."""

    def __init__(self, option: DraftAhead, token_count: int) -> None:
        """
        Args:
            option: The configuration.
            token_count: Tokens of a proposal.
        """
        self._option = option
        self._token_count = min(token_count, MAX_AHEAD_TOKENS)
        self._choices: dict[int, AheadChoice] = {}
        self._last: tuple[AheadChoice, bool] | None = None
        """Choice of the step in progress, if it may be counted."""
        self._was_on = False

    @property
    def max_budget(self) -> AheadBudget | None:
        """The most that any step will grant; None for nothing."""
        if self._option == "off":
            return None
        branches = self._option if isinstance(self._option, int) else _MAX_BRANCHES
        return AheadBudget(branches, self._token_count)

    def begin_step(self, sequences: int) -> AheadBudget | None:
        """Budget of each of so many sequences in the step that begins; None for not at all."""
        if self._option == "off":
            return None
        if isinstance(self._option, int):
            return AheadBudget(self._option, self._token_count)
        bucket = max(sequences, 1).bit_length()
        choice = self._choices.get(bucket)
        if choice is None:
            choice = self._choices[bucket] = AheadChoice(1)
        is_on = choice.begin_round()
        # A step after a change of ways is half of either.
        self._last = (choice, is_on) if is_on == self._was_on else None
        self._was_on = is_on
        if not is_on:
            return None
        return AheadBudget(max(min(_MAX_BRANCHES, _MAX_ROWS // max(sequences, 1)), 1), self._token_count)

    def end_step(self, tokens: float, seconds: float) -> None:
        """Count the step that has ended: tokens of each sequence, and its time with the wait for proposals."""
        if self._last is not None:
            choice, is_on = self._last
            choice.end_round(was_on=is_on, tokens=tokens, seconds=seconds)
            self._last = None

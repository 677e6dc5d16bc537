"""Proposals by outcome, with which a target begins the next round before it is asked for it."""

from __future__ import annotations

from typing import NamedTuple

from tandem.model.types import ENDED, DraftedOutcomes, RowKind, VerifyStep


class _RoundOutcomes(NamedTuple):
    base_length: int
    keys: tuple[tuple[int, int], ...]
    """Each outcome: number of accepted tokens, and the token that follows them; the likeliest first."""
    proposals: dict[tuple[int, int], tuple[int, ...]]


class OutcomeTable:
    """The outcomes of one round of a sequence, as far as the draft has pushed them.

    One thread adds while another may look up: a round's entries only grow, and a new round replaces them in one step.
    """

    def __init__(self) -> None:
        self.min_proposed, self.alone_after_miss = 0, False
        """See `VerifyStep`; of the step that was asked for last."""
        self.own_tokens: int | None = None
        """The same: how many tokens the target's own head proposes in the steps that follow by themselves."""
        self.row_kind = RowKind.TOKEN
        """The same: the rows with which those answer."""
        self._round = _RoundOutcomes(-1, (), {})

    def add(self, drafted: DraftedOutcomes) -> bool:
        """Take one depth of the outcomes of a round; false for one whose first depth is missing, which is dropped."""
        depth, token_ids = drafted.depth, drafted.token_ids
        if depth == 0:
            keys = tuple(zip(drafted.accepted_counts, drafted.next_token_ids, strict=False))
            self._round = _RoundOutcomes(drafted.base_length, keys, {})
        base_length, keys, proposals = self._round
        if drafted.base_length != base_length:
            return False
        for index, (key, token_id) in enumerate(zip(keys, token_ids, strict=False)):
            before = proposals.get(key, ())[:depth]
            # With fewer, a message was lost: whoever else has the table must not read other tokens in it.
            if token_id != ENDED and len(before) == depth:
                proposals[key] = (*before, token_id, *(drafted.lead_token_ids if index == 0 else ()))
        return True

    def ask(self, step: VerifyStep) -> None:
        self.min_proposed = step.min_proposed
        self.alone_after_miss = step.alone_after_miss
        self.own_tokens = step.own_tokens
        self.row_kind = step.row_kind

    def suffices(self, base_length: int, accepted_count: int, next_token_id: int, room: int) -> bool:
        """True if the target may go on with what is here for an outcome, where there is room for so many tokens."""
        known = self._round
        is_miss = known.base_length == base_length and (accepted_count, next_token_id) not in known.keys
        if is_miss and self.alone_after_miss:
            return True
        return len(self.find(base_length, accepted_count, next_token_id)) >= min(self.min_proposed, room)

    def find(self, base_length: int, accepted_count: int, next_token_id: int) -> tuple[int, ...]:
        """The proposal for an outcome of the round that extends so many tokens; empty where there is none."""
        known = self._round
        if known.base_length != base_length:
            return ()
        return known.proposals.get((accepted_count, next_token_id), ())

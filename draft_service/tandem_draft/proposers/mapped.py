"""A sequence in a target's tokens, for a draft that has others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tandem.drafting.tokens import check_start
from tandem.model.grammar import GrammarState
from tandem.model.types import Delta, Proposal, ProposeStep
from tandem.model.vocabulary import Transcript
from tandem_draft.proposers.ahead import AheadDrafter, Pushed
from tandem_draft.proposers.mapping import Mapped, MappedTrunk
from tandem_draft.proposers.sequence import StandaloneSequence

_MANY_TOKENS = 512
"""So many tokens are read in a thread: it takes a millisecond."""


@dataclass(eq=False)
class MappedSequence:
    """A sequence in a target's tokens, which is drafted for in the draft's."""

    drafted: StandaloneSequence
    mapped: Mapped
    ahead: AheadDrafter | None = None
    grammar: GrammarState | None = None
    _token_ids: list[int] = field(default_factory=list, init=False)
    """The target's, those of a proposal that is being verified included."""
    _length: int = field(default=0, init=False)
    """Tokens that were sent, without those of an answered proposal."""
    _read: int = field(default=0, init=False)
    """The transcript's first tokens that the draft has."""

    def __post_init__(self) -> None:
        self._transcript = Transcript(self.mapped.vocabulary)

    @property
    def pushed(self) -> Pushed | None:
        return None if self.ahead is None else self.ahead.pushed

    async def propose(self, step: ProposeStep) -> Proposal | None:
        """Apply the step's delta and draw the tokens that follow. None are proposed while the text ends within a
        character, and behind a text that is longer than the draft can read.

        With a budget, what may follow the proposal is then drafted ahead and pushed. A step that asks for nothing else
        has no answer of its own: None.
        """
        check_start(step.delta, self._length)
        self._length = step.delta.length
        if self.ahead is not None:
            self.ahead.apply(step)
        committed = self._commit(step)
        if len(committed.token_ids) > _MANY_TOKENS:
            changed = await asyncio.to_thread(self._transcript.apply, committed)
        else:
            changed = self._transcript.apply(committed)
        self._read = min(self._read, changed.base_length)
        if not step.is_answered:
            self._draft_ahead(step, step.delta)
            return None
        proposal = await self._draft(committed.length, step.token_count)
        if step.ahead is not None:
            self._token_ids += proposal.token_ids
            self._draft_ahead(step, Delta(committed.length, proposal.token_ids))
        return proposal

    def _commit(self, step: ProposeStep) -> Delta:
        """Apply a step's delta to the target's tokens; that of the transcript, which has no proposal."""
        delta = step.delta
        tokens = self._token_ids
        tokens[delta.base_length :] = delta.token_ids
        length = len(tokens) - (0 if step.is_answered else step.proposed_count)
        base = min(delta.base_length, self._transcript.length, length)
        return Delta(base, tuple(tokens[base:length]))

    async def _draft(self, base_length: int, wanted: int) -> Proposal:
        transcript = self._transcript
        room = self.drafted.room(len(transcript.token_ids))
        if room < 1 or not transcript.token_ids:
            return Proposal(base_length)
        count = min(wanted, room) if transcript.is_whole else 0
        delta = Delta(self._read, tuple(transcript.token_ids[self._read :]))
        self._read = len(transcript.token_ids)
        before = None
        if self.grammar is not None:
            before = self._token_ids[self.drafted.options.prompt_length : base_length]
        proposal = await self.drafted.draw(delta, count, base_length, self.mapped.tokens, before)
        if self.mapped.tokens is not None:
            return proposal
        written = self.mapped.vocabulary.retokenize(proposal.token_ids)[:wanted]
        if self.grammar is not None and before is not None:
            written = written[: self.grammar.allowed_count(written)] if self.grammar.follow(before) else ()
        return Proposal(base_length, written, cost=proposal.cost)

    def _draft_ahead(self, step: ProposeStep, delta: Delta) -> None:
        if self.ahead is None or not self._transcript.token_ids:
            return
        proposed = self._token_ids[self._transcript.length :]
        trunk = MappedTrunk(self.mapped, self._transcript, proposed, self._read)
        if trunk.places:
            self._read = min(self._read, trunk.delta.base_length)
            self.ahead.begin(step, delta, len(proposed), trunk)

"""A sequence in the draft's own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tandem.drafting.proposal import Drafting, SharedTokens, check_room
from tandem.drafting.tokens import check_start
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Job
from tandem.engine.interface import non_finite_logits_logged
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.model.grammar import GrammarState
from tandem.model.types import Delta, DraftOptions, Proposal, ProposeStep
from tandem_draft.proposers.ahead import AheadDrafter, Pushed


@dataclass(slots=True, eq=False)
class StandaloneSequence:
    """One sequence that is drafted for."""

    engine: Engine[Drafting, Proposal]
    cached: CachedSequence
    options: DraftOptions
    ahead: AheadDrafter | None = None
    grammar: GrammarState | None = None
    _length: int = field(default=0, init=False)
    """Tokens that were sent, without those that were proposed."""

    @property
    def pushed(self) -> Pushed | None:
        return None if self.ahead is None else self.ahead.pushed

    async def propose(self, step: ProposeStep) -> Proposal | None:
        """Apply the step's delta and draw the tokens that follow, each from the draft's distribution.

        With a budget, what may follow the proposal is then drafted ahead and pushed. A step that asks for nothing else
        has no answer of its own: None.
        """
        check_start(step.delta, self._length)
        check_room(self.cached, step.delta.length, step.token_count)
        self._length = step.delta.length
        if self.ahead is not None:
            self.ahead.apply(step)
        if not step.is_answered:
            if self.ahead is not None:
                self.ahead.begin(step, step.delta, step.proposed_count)
            return None
        proposal = await self.draw(step.delta, step.token_count)
        if self.ahead is not None and step.ahead is not None:
            self.ahead.begin(step, Delta(step.delta.length, proposal.token_ids), len(proposal))
        return proposal

    def room(self, length: int) -> int:
        return self.cached.max_length - length + 1  # the draft does not read the last token

    async def draw(
        self,
        delta: Delta,
        count: int,
        base_length: int | None = None,
        shared: SharedTokens | None = None,
        before: list[int] | None = None,
    ) -> Proposal:
        """Apply a delta of the draft's tokens and draw tokens, without drafting ahead.

        Where the target's tokens are others, `base_length` and `before` are of those, and `shared` are the tokens to
        draw among; see `Drafting`.
        """
        base_length = delta.length if base_length is None else base_length
        drafting = Drafting(
            base_length, count, self.options, grammar=self.grammar, shared=shared, before=before
        )
        if count == 0:
            await self.engine.submit(Job(self.cached, delta, 0, drafting))
            return Proposal(base_length)
        job = Job(self.cached, delta, 1, drafting)
        with non_finite_logits_logged(self.options.request_id):
            return replace(await self.engine.submit(job), cost=job.cost)

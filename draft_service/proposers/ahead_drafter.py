"""One sequence's drafting ahead: begins it, ends it, and learns from what came of it."""

from __future__ import annotations

import asyncio
from functools import partial

from draft_service.proposers.branch_drafting import BranchDrafting
from draft_service.proposers.drafting import Drafting
from draft_service.proposers.outcome_choice import OutcomeHistory
from tandem.engine.backends.interface import Sampler
from tandem.engine.core.engine import Engine
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import (
    MAX_AHEAD_TOKENS,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
)

Pushed = asyncio.Queue[DraftedOutcomes | Exception]
"""Messages that go to the coordinator unasked; an error ends the sequence."""

_KINDS = (RowKind.TOKEN, RowKind.SUPPORT)
"""Rows under which the draft can tell which outcomes are likely."""


class AheadDrafter:
    """Drafts ahead of the verifications of one sequence."""

    def __init__(
        self,
        engine: Engine[Drafting, Proposal],
        cached: CachedSequence,
        options: DraftOptions,
        draft_top_k: int,
        support_mass: float,
        sampler: Sampler,
        history: OutcomeHistory,
    ) -> None:
        self._engine = engine
        self._cached = cached
        self._options = options
        self._draft_top_k = draft_top_k
        self._support_mass = support_mass
        self._sampler = sampler
        self._history = history
        self._loop = asyncio.get_running_loop()
        self._token_ids: list[int] = []
        self._round: BranchDrafting | None = None
        self._rounds = 0
        self.pushed: Pushed = asyncio.Queue()
        """At most a round's depths: the next step empties it."""

    def apply(self, step: ProposeStep) -> None:
        """Note what a step makes of the sequence: what came of the last round, and that it is over.

        Raises:
            InvalidRequestError: the step's delta starts past the sequence's end.
        """
        delta, token_ids = step.delta, self._token_ids
        if not 0 <= delta.base_length <= len(token_ids):
            raise InvalidRequestError(
                f"The delta starts at token {delta.base_length}, but the sequence has {len(token_ids)} tokens; "
                "send the missing ones from base_length 0."
            )
        token_ids[delta.base_length :] = delta.token_ids
        last, self._round = self._round, None
        self._rounds += 1
        if last is not None:
            self._learn(last, token_ids[: len(token_ids) - step.proposed_count])
        while not self.pushed.empty():
            self.pushed.get_nowait()

    def begin(self, step: ProposeStep, delta: Delta, proposed_count: int) -> None:
        """Draft ahead of the verification of the last tokens of the sequence."""
        if step.ahead is None or self._options.row_kind not in _KINDS or self._options.with_token_logits:
            return
        if proposed_count > MAX_AHEAD_TOKENS:
            return  # reading it takes a row of the vocabulary for each token
        if step.is_answered and delta.length > self._cached.max_length:
            return  # the longest proposal has one token more than the sequence can hold
        self._token_ids[delta.base_length :] = delta.token_ids
        proposed = tuple(self._token_ids[len(self._token_ids) - proposed_count :])
        self._round = job = BranchDrafting(
            self._cached,
            delta,
            proposed,
            step.ahead,
            self._options,
            self._draft_top_k,
            self._support_mass,
            self._sampler,
            self._history,
            max_length=self._engine.max_length,
            push=partial(self._push, self._rounds),
        )
        self._engine.put_back(job)

    def _push(self, of_round: int, drafted: DraftedOutcomes | TandemError) -> None:
        """Hand over to the event loop what the engine's thread has drafted."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, of_round, drafted)

    def _take(self, of_round: int, drafted: DraftedOutcomes | TandemError) -> None:
        if of_round == self._rounds or isinstance(drafted, TandemError):
            self.pushed.put_nowait(drafted)

    def _learn(self, last: BranchDrafting, committed: list[int]) -> None:
        following = committed[last.base_length :]
        if last.ranking is None or not following:
            return
        proposed = last.proposed
        accepted = next(
            (i for i, (token, own) in enumerate(zip(following, proposed, strict=False)) if token != own),
            min(len(following), len(proposed)),
        )
        if accepted < len(following):
            self._history.came(proposed, last.ranking, accepted, following[accepted])

"""The rounds of one request: propose, verify, accept, emit.

Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1. Where a draft works ahead of its target, and a target ahead of
its coordinator, a round finds its proposal made, or its verification begun; the order remains. Of the two sides neither
knows the other: this module alone knows both.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    NO_LEAD,
    Acceptance,
    Chunk,
    DraftedOutcomes,
    Lead,
    OwnHead,
    Proposal,
    Verification,
)
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.outcomes import IDLE, Away, Coming, Hit, Idle, Miss, Outcome
from tandem_coordinator.rounds.events import RequestEvents
from tandem_coordinator.rounds.question import Asked, Late, Question
from tandem_coordinator.stats.rounds import RoundEnded, RoundPlan, RoundTimes

Accept = Callable[[Completion, Proposal, Verification], Acceptance]
"""Decides how much of a proposal is kept, and which token follows it."""
TokenDetails = Callable[[Chunk, Proposal, Verification, Acceptance], Chunk]
"""Adds to a chunk what its request wants to know of its tokens."""


class TargetSide(Protocol):
    """The target of a request."""

    @property
    def address(self) -> str | None:
        """None before it has one."""

    @property
    def has_read(self) -> bool:
        """True if the last answer was the first of its stream, for which the target read all tokens."""

    @property
    def has_head(self) -> bool:
        """True if it drafts by itself."""

    async def verify(self, completion: Completion, asked: Proposal | OwnHead, lead: Lead) -> Verification:
        """The target's row at each position of the proposal, and at the one after it. It says which proposal that is
        where its own head makes it."""

    def find_led(self, completion: Completion) -> Proposal | OwnHead | None:
        """The proposal of the round that the target has begun by itself behind the completion; None without one."""

    def pass_on(self, outcomes: DraftedOutcomes) -> None:
        """Let the target have what the draft proposes behind outcomes of the round in progress."""


class DraftSide(Protocol):
    """The draft of a request. One that is lost, draining or late is `Away`, and never an error."""

    @property
    def address(self) -> str | None:
        """None without one."""

    @property
    def is_ahead(self) -> bool:
        """True if it works ahead of the round in progress."""

    @property
    def usual_seconds(self) -> float:
        """Usual time to wait for a proposal."""

    def limit(self, completion: Completion, tokens: int) -> int:
        """Number of tokens it may propose, of so many."""

    def rest(self, completion: Completion, plan: RoundPlan) -> None:
        """It is not asked in this round."""

    def outcome(self, completion: Completion) -> Outcome | Away:
        """The continuation that it has ready behind the round that has ended."""

    async def wait_for(self, completion: Completion, coming: Coming, tokens: int) -> Proposal | None:
        """So many tokens of what is still coming, or what is there in time; None where it fails."""

    async def ask(self, completion: Completion, tokens: int, plan: RoundPlan) -> Asked | Late | None:
        """Its answer to a question for so many tokens; None where it cannot be asked in this round."""

    def draft_ahead_of(self, completion: Completion, proposal: Proposal, plan: RoundPlan) -> None:
        """It may work ahead of this proposal, if it has followed so far."""


class RoundController(Protocol):
    """Decides how much each round proposes, and how far the draft works ahead."""

    def begin_round(self, load: int, target_address: str | None) -> RoundPlan: ...

    def tokens_after_hit(self, coming: Coming, tokens: int) -> int:
        """Number of tokens of a continuation to wait for, `tokens` at most."""

    def tokens_after_miss(self, tokens: int) -> int:
        """Number of tokens to ask for, `tokens` at most, where another outcome came than was drafted for. 0: the target
        goes on alone, and the draft drafts ahead of that."""


class TargetAlone:
    """Decides for requests without a draft."""

    def begin_round(self, load: int, target_address: str | None) -> RoundPlan:
        return RoundPlan(0, load=0)

    def tokens_after_hit(self, coming: Coming, tokens: int) -> int:
        return 0

    def tokens_after_miss(self, tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """Terms that hold for all rounds of a request."""

    credits: int = 0
    """Number of rounds that the target may begin by itself behind one that it was asked for."""
    leads_with_proposals: bool = False
    """True if it may also begin those that have a proposal: it decides as the rule does."""
    keeps_proposals: bool = False
    """True if the text depends on what is proposed, and must not depend on time: whole proposals, or none."""
    asks_head: bool = False
    """True if a target with a head of its own proposes."""


@dataclass(slots=True, eq=False)
class RoundSession:
    """Has the rounds of one request."""

    completion: Completion
    draft: DraftSide
    target: TargetSide
    controller: RoundController
    accept: Accept
    events: RequestEvents
    policy: SessionPolicy
    load: Callable[[str | None], int]
    """Sequences that share the target with this address."""
    details: TokenDetails | None = None
    """None where the request wants to know nothing of its tokens."""
    _went_alone: bool = False
    """True if the last outcome that nobody had drafted for left the target alone for a round."""
    _last_draft: str | None = None

    async def rounds(self) -> AsyncGenerator[Chunk]:
        """Complete the prompt, a chunk for each round."""
        completion = self.completion
        ended_at = time.perf_counter()
        while completion.can_extend:
            began = ended_at
            requested = time.perf_counter()
            plan = self.controller.begin_round(self.load(self.target.address), self.target.address)
            question = await self.question(plan)
            proposed = time.perf_counter()
            verification = await self.target.verify(completion, question.asked, question.lead)
            verified = time.perf_counter()
            proposal = question.proposal_of(verification)
            acceptance = self.accept(completion, proposal, verification)
            ended_at = time.perf_counter()
            chunk = completion.extend(
                proposal,
                acceptance,
                ahead=question.outcome_rank is not None,
                is_forced=question.is_forced,
            )
            times = RoundTimes(began, requested, proposed, verified, ended_at)
            self.events.round_ended(self._event_of(plan, question, verification, acceptance, chunk, times))
            if self.details is not None:
                chunk = self.details(chunk, proposal, verification, acceptance)
            yield chunk

    async def question(self, plan: RoundPlan) -> Question:
        """Decide what to ask the target in the round that begins."""
        completion = self.completion
        begun = self.target.find_led(completion)
        if self.policy.asks_head and self.target.has_head:
            return self._question_to_head(plan, begun)
        tokens = self.draft.limit(completion, min(plan.tokens, completion.room - 1))
        if tokens <= 0:
            self.draft.rest(completion, plan)
        if isinstance(begun, Proposal):
            question = self._question_led(begun, tokens)
        else:
            question = await self._question_now(plan, tokens)
        # Behind an answer it works ahead already, as it was asked to
        self.draft.draft_ahead_of(completion, question.given, plan)
        if not question.is_forced:
            question.lead = self._lead(tokens)
        return question

    def _question_to_head(self, plan: RoundPlan, begun: Proposal | OwnHead | None) -> Question:
        """The question of a round for which the target's own head proposes, unless the grammar does."""
        tokens = min(plan.tokens, self.completion.room - 1)
        forced = self.completion.forced() if begun is None else None
        if forced is not None and len(forced) >= tokens:
            return Question(forced, is_forced=True)
        return Question(OwnHead(max(tokens, 0)), Lead(self.policy.credits))

    def _question_led(self, begun: Proposal, tokens: int) -> Question:
        """The question of a round that the target has begun by itself, with a proposal of the draft's or alone."""
        outcome: Outcome | Away = IDLE
        if tokens > 0:
            outcome = self.draft.outcome(self.completion)
        if not begun and isinstance(outcome, Hit | Coming):
            outcome = Miss(outcome.step)  # its tokens came after the target had gone on without them
        if not isinstance(outcome, Idle | Away):
            self._went_alone = isinstance(outcome, Miss)
        return Question(begun, outcome=outcome)

    async def _question_now(self, plan: RoundPlan, tokens: int) -> Question:
        """The question of a round that nobody has begun."""
        completion = self.completion
        forced = completion.forced()
        if forced is not None and len(forced) >= tokens:
            return Question(forced, is_forced=True)
        if tokens <= 0:
            return Question(Proposal(completion.length))
        question = await self._question_to_draft(plan, tokens)
        if forced is not None and not question.given:
            question.asked = forced
            question.is_forced = True
        return question

    async def _question_to_draft(self, plan: RoundPlan, tokens: int) -> Question:
        """The question with what the draft has ready, or answers; with nothing where it has nothing in time."""
        completion = self.completion
        ready: Proposal | None = None
        outcome = self.draft.outcome(completion)
        match outcome:
            case Away():
                return Question(Proposal(completion.length), outcome=outcome)
            case Hit(found):
                ready = found
            case Coming():
                ready = await self.draft.wait_for(
                    completion, outcome, self._tokens_after_hit(outcome, tokens)
                )
            case Miss() | Idle():
                pass
        if ready is not None and self._is_enough(ready, tokens):
            self._went_alone = False
            return Question(ready.cut(tokens), outcome=outcome)
        if not isinstance(outcome, Idle):
            outcome = Miss(outcome.step)
            tokens = self._tokens_after_miss(tokens)
            self._went_alone = tokens == 0
        answer = await self.draft.ask(completion, tokens, plan) if tokens > 0 else None
        proposal = Proposal(completion.length)
        if isinstance(answer, Asked):
            proposal = completion.possible(answer.proposal)
        return Question(proposal, outcome=outcome, answer=answer)

    def _tokens_after_hit(self, coming: Coming, tokens: int) -> int:
        if not self.policy.keeps_proposals:
            return self.controller.tokens_after_hit(coming, tokens)
        # A shorter one is of no use, and to ask anew takes longer than to wait for the rest.
        return tokens if tokens <= coming.max_tokens else coming.ready

    def _is_enough(self, ready: Proposal, tokens: int) -> bool:
        """False for a proposal whose length is a matter of time, where the text must not be."""
        return not self.policy.keeps_proposals or len(ready) >= tokens

    def _tokens_after_miss(self, tokens: int) -> int:
        # Never twice alone: a draft that has nothing ready after a round of the target alone must be asked.
        if self.policy.keeps_proposals or self._went_alone:
            return tokens
        return self.controller.tokens_after_miss(tokens)

    def _lead(self, tokens: int) -> Lead:
        """The lead to grant the target: alone where no draft is asked, and otherwise with the outcomes that the draft
        drafts ahead."""
        most = self.policy.credits
        if not most:
            return NO_LEAD
        if tokens <= 0:
            return Lead(most)
        if not (self.policy.leads_with_proposals and self.draft.is_ahead):
            return NO_LEAD
        may_go_alone = not self._went_alone and self.controller.tokens_after_miss(tokens) == 0
        # With a whole proposal or not unasked: in the time that a question takes, a late draft makes more than a round
        # gains that begins early with less.
        return Lead(most, min(tokens, MAX_AHEAD_TOKENS), may_go_alone)

    def _event_of(
        self,
        plan: RoundPlan,
        question: Question,
        verification: Verification,
        acceptance: Acceptance,
        chunk: Chunk,
        times: RoundTimes,
    ) -> RoundEnded:
        """The event of a round that ended with this chunk."""
        has_read = self.target.has_read
        verify_seconds = times.verified - times.proposed
        cost = None
        if not has_read:
            cost = question.cost(verification, plan.load, verify_seconds, times.seconds)
        answer = question.answer
        rank = question.outcome_rank
        self._last_draft = self.draft.address or self._last_draft
        return RoundEnded(
            proposed=chunk.proposed,
            accepted=sum(chunk.drafted),
            committed=len(chunk.token_ids),
            plan=plan,
            times=times,
            cost=cost,
            has_read=has_read,
            is_drafted=question.is_drafted,
            forced=min(acceptance.accepted_count, len(chunk.token_ids)) if question.is_forced else 0,
            draft_address=self._last_draft,
            target_address=self.target.address,
            awaited_outcome=question.awaited_outcome,
            outcome_rank=rank,
            outcome_step=None if isinstance(question.outcome, Idle | Away) else question.outcome.step,
            asked_seconds=answer.seconds if isinstance(answer, Asked) else None,
            saved_seconds=0.0 if rank is None else self.draft.usual_seconds,
            was_late=isinstance(answer, Late),
        )

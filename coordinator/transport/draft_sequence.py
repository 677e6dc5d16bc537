"""One sequence on a draft service: what is asked of it, what it answers, and what it drafts ahead."""

from __future__ import annotations

import time

from coordinator.speculation.waiting import Unfinished
from coordinator.telemetry.observer import NO_OBSERVER, StreamObserver
from coordinator.transport.arrivals import Arrivals
from coordinator.transport.outcomes import PendingOutcomes
from coordinator.transport.proposal_checks import DraftLimits, check_proposal
from coordinator.transport.remote_sequence import RemoteSequence
from coordinator.transport.sequence_stream import SequenceStream
from coordinator.transport.tokens import Tokens
from tandem.errors import ProtocolError, TandemError
from tandem.types import AheadBudget, DraftedOutcomes, DraftOptions, Proposal, ProposeStep
from tandem.v1 import draft_pb2
from tandem.wire import draft as wire

_FINISH_SECONDS = 0.5
"""How long the service may take to let go of the sequence before it is dropped."""


class DraftSequence:
    """Asks a draft service for proposals, for as long as the sequence stays there.

    It begins by letting the draft read the sequence while the target does, without waiting for it. One step at a time
    is under way; while its answer is late, no other is asked for. What the draft drafts ahead arrives between answers
    and is kept until the next round begins.
    """

    def __init__(
        self,
        stream: SequenceStream[wire.Answer],
        options: DraftOptions,
        limits: DraftLimits,
        observer: StreamObserver = NO_OBSERVER,
    ) -> None:
        self._stream = stream
        self._observer = observer
        self._options = options
        self._limits = limits
        self._remote = RemoteSequence()
        self._outcomes = PendingOutcomes(limits.vocabulary_size, options.row_kind)
        self._granted: AheadBudget | None = None
        """Budget of the step whose answer is awaited."""
        self._lengths_alone: set[int] = set()
        """Lengths at which the target went on alone since the last answer. A draft that knows budgets answers none."""
        self._knows_budgets = True
        self._is_asked = False
        """True from a question on until somebody has taken its answer."""
        self._answer: Proposal | None = None
        """To the last question, until somebody has taken it."""
        self._arrivals = Arrivals()
        self._error: TandemError | None = None
        self._is_open = False
        self._late_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """True if every step so far was answered."""
        return not self._is_asked or self._answer is not None or self._error is not None

    @property
    def is_open(self) -> bool:
        """True once the draft has read the sequence. Before that, the draft may be waiting for room."""
        return self._is_open

    @property
    def is_late(self) -> bool:
        """True if a round has waited for an answer in vain."""
        return self._late_since is not None

    @property
    def late_seconds(self) -> float:
        """Seconds by which an answer is late; 0 when none is."""
        return 0.0 if self._late_since is None else time.monotonic() - self._late_since

    def awaits_outcome(self, completion: Tokens) -> bool:
        """True if outcomes of the round that has ended were asked for."""
        return self._knows_budgets and self._outcomes.awaits(completion.token_ids)

    def take_branch_steps(self) -> list[tuple[int, float]]:
        """Steps that the draft made ahead since this was last asked: number of branches, seconds."""
        return self._outcomes.take_steps()

    def unread(self, completion: Tokens) -> int:
        """How many of the completion's tokens the draft does not have; 0 while a step's answer is outstanding."""
        return 0 if self._is_asked else completion.length - self._remote.length

    def read(self, completion: Tokens) -> None:
        """Let the draft read what it does not have, without waiting for it."""
        self._ask(completion, 0)

    def begin(self, completion: Tokens) -> None:
        """Open the sequence, and let the draft read it."""
        self._stream.listen(self._take, self._fail)
        self._ask(completion, 0, None, wire.options_to_proto(self._options))

    def drafted_ahead(self, completion: Tokens) -> Proposal | None:
        """The continuation that was drafted ahead of what the last verification said; None where there is none.

        Raises:
            TandemError: the draft failed since. It is of no use any more.
        """
        if self._error is not None:
            self._observer.ended(self._error)
            raise self._error
        if self._is_asked:
            return None
        return self._outcomes.find(completion.token_ids)

    def unfinished(self, completion: Tokens) -> Unfinished | None:
        """The continuation of the outcome that came, while the draft is still at it; None otherwise."""
        return self._outcomes.unfinished(completion.token_ids, time.monotonic())

    async def reach_depth(self, completion: Tokens, tokens: int, seconds: float) -> None:
        """Wait until the continuation of the outcome that came has so many tokens, but not longer than so many seconds.

        A failure of the draft ends the wait; `drafted_ahead` says which.
        """
        until = time.monotonic() + seconds
        while self._outcomes.ready_count(completion.token_ids) < tokens and self._error is None:
            if time.monotonic() >= until:
                break
            await self._arrivals.next(until)

    def go_on(self, completion: Tokens, proposal: Proposal, budget: AheadBudget | None) -> None:
        """Tell the draft what is being verified, so that it drafts ahead of that. Nothing is waited for.

        A draft that has not read the message before is granted nothing: the next round asks it, and notices that it is
        late.
        """
        if self._stream.is_posting:
            budget = None
        self._outcomes.expect(completion.length, proposal.token_ids, budget)
        if budget is None:
            return
        if not proposal.token_ids:
            self._lengths_alone.add(completion.length)
        delta = self._remote.delta_to(completion.token_ids, proposal.token_ids)
        step = ProposeStep(delta, 0, budget, len(proposal))
        self._stream.post(wire.step_to_proto(step))

    async def propose(
        self, completion: Tokens, count: int, patience_seconds: float, budget: AheadBudget | None = None
    ) -> Proposal | None:
        """Up to `count` tokens that may follow; None while the draft is late.

        Args:
            completion: What they follow.
            count: How many.
            patience_seconds: How long to wait.
            budget: How far the draft may then draft ahead.

        Raises:
            TandemError: the draft failed, or proposed what cannot be verified. It is of no use any more.
        """
        until = time.monotonic() + patience_seconds
        try:
            if self._error is not None:
                raise self._error
            if self._is_asked and await self._answered(until) is None:
                return None
            self._ask(completion, count, budget)
            proposal = await self._answered(until)
            if proposal is not None:
                check_proposal(
                    proposal,
                    completion.length,
                    count,
                    self._limits.vocabulary_size,
                    with_token_logits=self._options.with_token_logits,
                )
        except TandemError as error:
            self._observer.ended(error)
            raise
        return proposal

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if self._is_asked:
            return
        self._stream.post(wire.finish_to_proto())
        until = time.monotonic() + _FINISH_SECONDS
        while self._error is None and time.monotonic() < until:
            await self._arrivals.next(until)

    def cancel(self) -> None:
        """Drop it, whatever is being done for it."""
        self._stream.cancel()
        self._stream.stop_listening()
        self._arrivals.close()
        self._observer.ended()

    def _ask(
        self,
        completion: Tokens,
        count: int,
        budget: AheadBudget | None = None,
        *opening: draft_pb2.ProposeRequest,
    ) -> None:
        step = ProposeStep(self._remote.delta_to(completion.token_ids), count, budget if count else None)
        messages = (*opening, wire.step_to_proto(step))
        self._outcomes.expect(completion.length, (), None)
        self._granted = step.ahead
        self._is_asked = True
        self._stream.post(*messages)

    async def _answered(self, until: float) -> Proposal | None:
        """The answer to the last step; None while it is late. What is late already is not waited for again."""
        was_awaited = self._answer is None
        while self._answer is None:
            if self._error is not None:
                raise self._error
            if self._late_since is not None or time.monotonic() >= until:
                self._late_since = self._late_since or time.monotonic()
                return None
            await self._arrivals.next(until)
        if was_awaited:
            self._stream.goes_on()
        answer, self._answer, self._late_since = self._answer, None, None
        self._is_asked, self._is_open = False, True
        return answer

    def _take(self, message: wire.Answer) -> None:
        """A message has come.

        Raises:
            ProtocolError: nobody asked for it.
        """
        answer = wire.answer_from_proto(message)
        if isinstance(answer, DraftedOutcomes):
            self._outcomes.add(answer, time.monotonic())
        else:
            self._take_proposal(answer)
        self._arrivals.notify()

    def _take_proposal(self, proposal: Proposal) -> None:
        """An answer has come. Outcomes of it may follow at once, before anybody looks at it."""
        if not proposal.token_ids and proposal.base_length in self._lengths_alone:
            # A release that does not draft ahead answers such a step like any other, and will push nothing.
            self._lengths_alone.discard(proposal.base_length)
            self._knows_budgets = False
            return
        if not self._is_asked or self._answer is not None:
            raise ProtocolError("draft service: it proposed what nobody had asked for")
        self._lengths_alone.clear()
        self._outcomes.expect(proposal.base_length, proposal.token_ids, self._granted)
        self._answer = proposal

    def _fail(self, error: TandemError) -> None:
        self._error = self._error or error
        self._outcomes.expect(0, (), None)
        self._arrivals.notify()

"""A draft service, as the coordinator sees it: its client, its sequences, and what it drafted ahead."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeAlias

import grpc.aio

from tandem.errors import ProtocolError
from tandem.model.replica import Role
from tandem.model.types import (
    ENDED,
    AheadBudget,
    Coverage,
    DraftedOutcomes,
    DraftLoad,
    DraftOptions,
    EngineStatistics,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    SparseDistribution,
    StepCost,
    TargetTokenizer,
)
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceStub
from tandem.wire import draft as wire
from tandem.wire.bounds import read_message
from tandem.wire.common import COVERAGE, model_info_from_proto, statistics_from_proto
from tandem.wire.features import PassedStates
from tandem.wire.status import Ending
from tandem_coordinator.outcomes import IDLE, Coming, Hit, Miss, Outcome
from tandem_coordinator.stats.speculation import MovingAverage
from tandem_coordinator.telemetry.observer import StreamObserver
from tandem_coordinator.transport.proposals import check_distribution, check_proposal
from tandem_coordinator.transport.services import recognize_others
from tandem_coordinator.transport.statuses import errors_of
from tandem_coordinator.transport.streams import StreamedSequence, Streams


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of a proposal."""

    num_speculative_tokens: int
    vocabulary_size: int
    """The target's; proposed ids must be below it."""
    keeps_proposals: bool = False
    """True if the text depends on what is proposed, and must not depend on time."""
    max_length: int | None = None
    """Tokens of a sequence beyond which nothing is proposed."""


_SERVICE = "draft service"
"""As errors name it."""


class Tokens(Protocol):
    """A sequence whose tokens never change once they are there: a completion, or a row of another engine's batch."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens, the prompt included."""

    @property
    def length(self) -> int:
        """Number of tokens."""


OnOutcomes: TypeAlias = Callable[[DraftedOutcomes], None] | None
"""Takes outcomes of the round in progress as they arrive."""

_PROMPT_BYTES = 1 << 15
"""Hidden states of so many bytes do not wait for the next step."""
_MAX_WAITING_BYTES = 64 << 20
"""A draft that reads so slowly is sent no more hidden states."""

_NO_OUTCOME = -1, -1
_MAX_SUPPORT_IDS = 1 << 16
"""Ids in all supports of a round: a mebibyte in memory, and three times what a draft of ours pushes."""


class PendingOutcomes:
    """The outcomes of the round in progress. Bounded by what was granted. No clock."""

    def __init__(self, vocabulary_size: int, row_kind: RowKind) -> None:
        self._vocabulary_size = vocabulary_size
        self._needs_distributions = row_kind is RowKind.SUPPORT
        self._base_length = 0
        self._proposed: tuple[int, ...] = ()
        self._budget: AheadBudget | None = None
        self._ranks: dict[tuple[int, int], int] = {}
        self._columns: list[DraftedOutcomes] = []
        self._lead: tuple[int, ...] = ()
        """Tokens of the first outcome behind those of the columns."""
        self._granted = 0
        """Messages that the draft may still push, of whichever round: how far it is behind, nobody knows."""
        self._support_ids = 0
        self._step = MovingAverage()
        """Seconds from one depth of a round to the next."""
        self._draft_step: StepCost | None = None
        """The draft's last step as it says. Its seconds count until two depths of one round have arrived: where
        verifications are short, that never happens."""
        self._arrived: float | None = None
        """When the round's last depth arrived."""

    def awaits(self, token_ids: Sequence[int]) -> bool:
        """True if a budget was granted for the round whose outcome this sequence is."""
        return self._budget is not None and self._key(token_ids) != _NO_OUTCOME

    def expect(self, base_length: int, proposed: Sequence[int], budget: AheadBudget | None) -> None:
        """A round begins that extends so many tokens by this proposal."""
        if budget is not None:
            self._granted += budget.token_count
        self._base_length = base_length
        self._proposed = tuple(proposed)
        self._budget = budget
        self._ranks.clear()
        self._columns.clear()
        self._lead = ()
        self._arrived = None
        self._support_ids = 0

    @property
    def is_granted(self) -> bool:
        """True if outcomes of the round in progress were asked for."""
        return self._budget is not None

    def add(self, drafted: DraftedOutcomes, now: float = 0.0) -> bool:
        """Take one depth of the outcomes, which has arrived now; false for one of an earlier round: it is dropped."""
        self._granted -= 1
        if drafted.base_length < self._base_length:
            if self._granted < 0:
                raise ProtocolError(
                    "draft service: it pushed more messages of rounds that are over than it was granted"
                )
            return False
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
        if self._arrived is not None:
            self._step.add(now - self._arrived)
        self._arrived = now
        self._draft_step = drafted.cost
        return True

    def outcome(self, token_ids: Sequence[int], now: float) -> Outcome:
        """The continuation that is there for the outcome with which this sequence ends."""
        key = self._key(token_ids)
        if self._budget is None or key == _NO_OUTCOME:
            return IDLE
        rank = self._ranks.get(key)
        step = self._draft_step if self._columns else None
        if rank is None:
            return Miss(step)
        proposal = self._continuation(len(token_ids), rank)
        due_seconds, step_seconds = self._due(rank, len(proposal), now)
        if step_seconds is not None:
            return Coming(proposal, rank, self._budget.token_count, due_seconds, step_seconds, step)
        return Hit(proposal, rank, step) if proposal else Miss(step)

    def _continuation(self, base_length: int, rank: int) -> Proposal:
        """The continuation of an outcome, as far as it is there."""
        columns = [column for column in self._columns if rank < len(column.token_ids)]
        distributions: tuple[SparseDistribution, ...] = ()
        if self._needs_distributions:
            distributions = tuple(column.distributions[rank] for column in columns)
        tokens = tuple(column.token_ids[rank] for column in columns if column.token_ids[rank] != ENDED)
        if rank == 0:
            tokens += self._lead
        return Proposal(base_length, tokens, distributions)

    def _due(self, rank: int, ready: int, now: float) -> tuple[float, float | None]:
        """Seconds until the next token of an outcome's continuation is due, and from each to the next; None for the
        latter where none will come, or nobody knows when."""
        assert self._budget is not None, "outcomes come of a round that has a budget"
        step_seconds = self._step.value
        if step_seconds is None and self._draft_step is not None:
            step_seconds = self._draft_step.seconds
        last = self._columns[-1].token_ids
        has_ended = rank >= len(last) or last[rank] == ENDED
        if has_ended or ready >= self._budget.token_count or self._arrived is None or step_seconds is None:
            return 0.0, None
        return max(self._arrived + step_seconds - now, 0.0), step_seconds

    def _key(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Number of accepted tokens and the token after them; `_NO_OUTCOME` where it is of another round."""
        following = token_ids[self._base_length :]
        if not following or len(following) > len(self._proposed) + 1:
            return _NO_OUTCOME
        accepted = len(following) - 1
        if tuple(following[:-1]) != self._proposed[:accepted]:
            return _NO_OUTCOME
        return accepted, following[-1]

    def _check(self, drafted: DraftedOutcomes, budget: AheadBudget) -> None:
        mistakes = chain(self._wrong_shape(drafted, budget), self._wrong_tokens(drafted))
        if (wrong := next(mistakes, None)) is not None:
            raise ProtocolError(f"draft service: {wrong}")
        if self._needs_distributions:
            for token_id, distribution in zip(drafted.token_ids, drafted.distributions, strict=True):
                check_distribution(_SERVICE, token_id, distribution, self._vocabulary_size)

    def _wrong_shape(self, drafted: DraftedOutcomes, budget: AheadBudget) -> Iterator[str]:
        depth = drafted.depth
        count = len(drafted.token_ids)
        lead = len(drafted.lead_token_ids)
        granted = budget.token_count
        known = len(self._columns)
        if depth != known or depth >= granted:
            yield (
                f"it pushed depth {depth} of its outcomes; depth {known} must follow, below the {granted} that were "
                "granted"
            )
        maximum = len(self._columns[-1].token_ids) if self._columns else budget.branch_count
        if not 0 < count <= maximum:
            yield f"it pushed {count} tokens at depth {depth}; it must be 1 to {maximum}"
        accepted = drafted.accepted_counts
        following = drafted.next_token_ids
        if len(accepted) != (count if depth == 0 else 0):
            yield f"it named {len(accepted)} outcomes with {count} tokens at depth {depth}; depth 0 alone names all"
        for each in accepted:
            if not 0 <= each <= len(self._proposed):
                yield f"it drafted for {each} accepted tokens; there are 0 to {len(self._proposed)}"
        if len(set(zip(accepted, following, strict=True))) != len(accepted):
            yield "it drafted twice for one outcome"
        if depth + 1 + lead > granted:
            yield f"it is {lead} tokens ahead at depth {depth} of its outcomes; {granted} tokens were granted"

    def _wrong_tokens(self, drafted: DraftedOutcomes) -> Iterator[str]:
        token_ids = drafted.token_ids
        lead = drafted.lead_token_ids
        before = self._columns[-1].token_ids if self._columns else token_ids
        if any(old == ENDED != new for old, new in zip(before, token_ids, strict=False)):
            yield "it went on with a continuation that it had ended"
        own = [token_id for token_id in token_ids if token_id != ENDED]
        for token_id in (*own, *drafted.next_token_ids, *lead):
            if not 0 <= token_id < self._vocabulary_size:
                yield f"it drafted token id {token_id} ahead; ids must be in 0..{self._vocabulary_size - 1}"
        if not self._needs_distributions:
            return
        if lead:
            yield "it is ahead with its first outcome by tokens without distributions; the rule needs one for each"
        if (count := len(drafted.distributions)) != len(token_ids):
            yield f"it pushed {len(token_ids)} tokens with {count} distributions; the rule needs one for each"
        self._support_ids += sum(len(each.token_ids) for each in drafted.distributions)
        if self._support_ids > _MAX_SUPPORT_IDS:
            yield f"it pushed supports of {self._support_ids} ids in one round; at most {_MAX_SUPPORT_IDS} are kept"


class DraftSequence(StreamedSequence[DraftOptions | ProposeStep | PassedStates, wire.Answer]):
    """Asks a draft service for proposals, for as long as the sequence stays there.

    It begins by letting the draft read the sequence while the target does, without waiting for it. One step at a time
    is under way; while its answer is late, no other is asked for. What the draft drafts ahead arrives between answers
    and is kept until the next round begins.
    """

    def __init__(
        self,
        streams: Streams[DraftOptions | ProposeStep | PassedStates, wire.Answer],
        options: DraftOptions,
        limits: DraftLimits,
        observer: StreamObserver,
        on_outcomes: OnOutcomes = None,
    ) -> None:
        super().__init__(streams, observer)
        self._options = replace(options, traceparent=observer.traceparent)
        self._limits = limits
        self.outcomes = PendingOutcomes(limits.vocabulary_size, options.row_kind)
        self._on_outcomes = on_outcomes
        self._granted: AheadBudget | None = None
        """Budget of the step whose answer is awaited."""
        self._is_asked = False
        """True from a question on until somebody has taken its answer."""
        self._question = 0, 0
        """Length of the sequence at the last question, and tokens that were asked for."""
        self._answer: Proposal | None = None
        """To the last question, until somebody has taken it."""
        self._waiter: asyncio.Future[None] | None = None
        """Set while somebody waits for an answer, for outcomes or for the end."""
        self._alarm: asyncio.TimerHandle | None = None
        """Ends a wait. It stays for the next one, as nearly every wait ends long before: a timer for each would take as
        long as to read a proposal."""
        self._alarm_at = 0.0
        self.is_open = False
        """True once the draft has read the sequence. Before that, the draft may be waiting for room."""
        self._late_since: float | None = None
        self._states: list[PassedStates] = []
        """Hidden states of the target that go with the next step."""
        self._has_lost_states = False

    @property
    def is_idle(self) -> bool:
        """True if every step so far was answered."""
        return not self._is_asked or self._answer is not None or self.error is not None

    @property
    def is_late(self) -> bool:
        return self._late_since is not None

    @property
    def late_seconds(self) -> float:
        """Seconds by which an answer is late; 0 when none is."""
        return 0.0 if self._late_since is None else time.monotonic() - self._late_since

    @property
    def held(self) -> int:
        """Number of tokens the draft has, or is to read."""
        return self._remote.length

    def unread(self, completion: Tokens) -> int:
        """How many of the completion's tokens the draft does not have; 0 while a step's answer is outstanding."""
        return 0 if self._is_asked else completion.length - self._remote.length

    def read(self, completion: Tokens) -> None:
        """Let the draft read what it does not have, without waiting for it. The first time it opens the sequence."""
        if not self.number:
            self.send(self._options)
        self._ask(completion, 0)

    def take_states(self, states: PassedStates) -> None:
        """Take hidden states of the target for the draft. Few wait for the next step, in whose message they go; those
        of a prompt are sent at once."""
        if self._has_lost_states or self.error is not None:
            return
        if self._stream.outbox.waiting_bytes > _MAX_WAITING_BYTES:
            self._has_lost_states = True  # of no use without these, which the draft will say
            self._states.clear()
            return
        self._states.append(states)
        if sum(each.size for each in self._states) >= _PROMPT_BYTES:
            self.send(*self._states)
            self._states.clear()

    def _send_step(self, step: ProposeStep) -> None:
        states = self._states
        self._states = []
        self.send(*states, step)

    def outcome(self, completion: Tokens) -> Outcome:
        """The continuation that the draft has ready behind the outcome of the last verification.

        Raises a TandemError where the draft has failed since: it is of no use any more.
        """
        if self.error is not None:
            raise self.error
        return self.outcomes.outcome(completion.token_ids, time.monotonic())

    async def rest(
        self, completion: Tokens, coming: Coming, count: int, at_most_seconds: float = math.inf
    ) -> Proposal:
        """A continuation that is still coming, once it has so many tokens; fewer where it takes too long.

        Raises a TandemError as `outcome` does.
        """
        # A margin for a slow step, and a millisecond because the event loop wakes up no more exactly
        seconds = min(1.5 * coming.seconds(count) + 0.001, at_most_seconds)
        until = time.monotonic() + seconds
        found: Outcome = coming
        while isinstance(found, Coming) and found.ready < count and time.monotonic() < until:
            await self._arrival(until)
            found = self.outcome(completion)
        return found.proposal if isinstance(found, Hit | Coming) else coming.proposal

    def go_on(self, completion: Tokens, proposal: Proposal, budget: AheadBudget | None) -> None:
        """Tell the draft what is being verified, so that it drafts ahead of that. Nothing is waited for.

        A draft that has not read the message before is granted nothing: the next round asks it, and notices that it is
        late.
        """
        if self.unwritten or self._options.ahead is None:
            budget = None
        self.outcomes.expect(completion.length, proposal.token_ids, budget)
        if budget is None:
            return
        delta = self._remote.delta_to(completion.token_ids, proposal.token_ids)
        self._send_step(ProposeStep(delta, 0, budget, len(proposal)))

    async def propose(
        self, completion: Tokens, count: int, patience_seconds: float, budget: AheadBudget | None = None
    ) -> Proposal | None:
        """Up to `count` tokens that may follow; None while the draft is late.

        Raises a TandemError where it failed or proposed what cannot be verified: it is of no use any more.
        """
        until = time.monotonic() + patience_seconds
        if self.error is not None:
            raise self.error
        if self._is_asked and await self._wait_for_answer(until) is None:
            return None
        self._ask(completion, count, budget)
        proposal = await self._wait_for_answer(until)
        if proposal is not None:
            self._check(proposal, *self._question)
        return proposal

    async def finish(self) -> None:
        if not self._is_asked:
            await super().finish()

    def _check(self, proposal: Proposal, length: int, count: int) -> None:
        vocabulary_size = self._limits.vocabulary_size
        with_token_logits = self._options.with_token_logits
        check_proposal(
            _SERVICE, proposal, length, count, vocabulary_size, with_token_logits=with_token_logits
        )

    def _ask(self, completion: Tokens, count: int, budget: AheadBudget | None = None) -> None:
        self._committed = completion.token_ids
        self._question = completion.length, count
        self.outcomes.expect(completion.length, (), None)
        self._granted = budget if count and self._options.ahead else None
        self._is_asked = True
        self._send_step(ProposeStep(self._remote.delta_to(completion.token_ids), count, self._granted))

    async def _wait_for_answer(self, until: float) -> Proposal | None:
        """The answer to the last step; None while it is late. What is late already is not waited for again."""
        was_awaited = self._answer is None
        while self._answer is None:
            if self.error is not None:
                raise self.error
            if self._late_since is not None or time.monotonic() >= until:
                self._late_since = self._late_since or time.monotonic()
                return None
            await self._arrival(until)
        answer = self._answer
        if was_awaited:
            self.goes_on()
        self._hand_over()
        return answer

    def _hand_over(self) -> None:
        """The answer is somebody's."""
        self._answer = self._late_since = None
        self._is_asked = False
        self.is_open = True

    def take(self, answer: wire.Answer) -> None:
        if isinstance(answer, DraftedOutcomes):
            if self.outcomes.add(answer, time.monotonic()) and self._on_outcomes is not None:
                self._on_outcomes(answer)
        elif not self._is_asked or self._answer is not None:
            raise ProtocolError("draft service: it proposed what nobody had asked for")
        else:
            # Outcomes of the answer may follow at once, before anybody looks at it.
            self.outcomes.expect(answer.base_length, answer.token_ids, self._granted)
            self._answer = answer
        self._wake()

    def notify(self) -> None:
        self.outcomes.expect(0, (), None)
        self._wake()

    async def _arrival(self, until: float) -> None:
        """Wait for something to arrive, but not beyond a moment of the monotonic clock. It may end without either."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if self._alarm is None or self._alarm_at > until:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_later(until - time.monotonic(), self._ring)
            self._alarm_at = until
        await self._waiter

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DraftClient:
    """Calls one draft service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = DraftServiceStub(channel)
        self.load = DraftLoad()
        """How busy it last said that it is."""
        self.statistics: EngineStatistics | None = None
        """The latest figures of its engine, if it has one and reports them."""
        self.streams: Streams[DraftOptions | ProposeStep | PassedStates, wire.Answer] = Streams(
            service="draft service",
            call=channel.stream_stream("/tandem.v1.DraftService/Propose"),
            write=wire.requests_to_proto,
            read=self._read,
        )

    async def model_info(self) -> ModelInfo:
        """The draft service's model, or its drafting method. Raises an OtherServiceError where a target answers."""
        with errors_of(_SERVICE):
            async with recognize_others(self._channel, Role.DRAFT):
                answer = await self._stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest())
        self._heard(answer)
        has_statistics = answer.HasField("statistics")
        self.statistics = statistics_from_proto(answer.statistics) if has_statistics else None
        return model_info_from_proto(answer.model_info)

    def _read(self, content: bytes) -> Iterator[tuple[int, wire.Answer | Ending | ProtocolError]]:
        message = read_message(draft_pb2.ProposeResponse, content)
        self._heard(message)
        return wire.answers_from_proto(message)

    def _heard(self, message: draft_pb2.ProposeResponse | draft_pb2.DraftServiceGetModelInfoResponse) -> None:
        if message.HasField("load"):
            self.load = wire.LOAD.from_proto(message.load)

    async def map_vocabulary(self, target: ModelInfo, content: bytes) -> Coverage:
        """Let it draft for a target with another tokenizer, whose tokenizer.json this is."""
        tokenizer = TargetTokenizer(
            target.tokenizer_hash, target.vocabulary_size, content, target.eos_token_ids
        )
        with errors_of("draft service"):
            answer = await self._stub.MapVocabulary(wire.tokenizer_to_proto(tokenizer))
        return COVERAGE.from_proto(answer.coverage)

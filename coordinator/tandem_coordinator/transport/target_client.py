"""A target service, as the coordinator sees it: its client, its sequences, and the checks of the rows it sends.

The client checks each answer as it arrives, so that an invalid one costs only the replica that sent it. If the
acceptance rule found it, the request would end.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

import grpc.aio
import numpy as np

from tandem.acceptance.rounds import MessageRounds, Round
from tandem.acceptance.strategies import AcceptanceRule, resolve
from tandem.config import SpeculativeConfig
from tandem.errors import ProtocolError, ServiceUnavailableError, TandemError
from tandem.model.leading import Leading, read_outcome
from tandem.model.replica import Role
from tandem.model.types import (
    NO_LEAD,
    CacheCounts,
    Delta,
    DenseRow,
    DraftedOutcomes,
    EngineStatistics,
    GoesOn,
    Lead,
    LeadStats,
    ModelInfo,
    OwnHead,
    Pending,
    Proposal,
    RowKind,
    RowLogprobs,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
    own_token_ids,
)
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire import target as wire
from tandem.wire.bounds import read_message
from tandem.wire.common import model_info_from_proto, statistics_from_proto
from tandem.wire.draft import MAX_TOKENIZER_BYTES
from tandem.wire.features import PassedStates
from tandem.wire.status import Ending
from tandem_coordinator.telemetry.observer import NO_OBSERVER, StreamObserver
from tandem_coordinator.transport.proposals import check_proposal
from tandem_coordinator.transport.services import recognize_others
from tandem_coordinator.transport.statuses import errors_of
from tandem_coordinator.transport.streams import StreamedSequence, Streams


def check_rows(verification: Verification, vocabulary_size: int, *, with_statistics: bool = False) -> None:
    """Refuse rows that no model of that vocabulary has, and support rows that lack the statistics asked for."""
    for row in verification.rows:
        if isinstance(row, TokenRow):
            wrong = _wrong_id(row.token_id, 0, vocabulary_size)
        elif isinstance(row, DenseRow):
            wrong = _wrong_logits(row, vocabulary_size)
        else:
            wrong = _wrong_support(row, vocabulary_size)
            if row.statistics is not None:
                wrong = wrong or _wrong_statistics(row.statistics, vocabulary_size)
            elif with_statistics:
                wrong = wrong or "a row came without statistics; they were asked for"
        if wrong:
            raise ProtocolError(f"target service: {wrong}")


def check_logprobs(verification: Verification, options: TargetOptions, vocabulary_size: int) -> None:
    """Raise a ProtocolError unless each row has the log probabilities that its sequence wants."""
    if options.logprobs is None and not options.sampled_logprobs:
        return
    if len(verification.logprobs) != len(verification.rows):
        raise ProtocolError(
            f"target service: log probabilities of {len(verification.logprobs)} rows came with "
            f"{len(verification.rows)} rows; the sequence wants those of each"
        )
    for row, found in zip(verification.rows, verification.logprobs, strict=True):
        if options.logprobs is not None:
            _check_most_probable(row, found, min(options.logprobs, vocabulary_size))
        if options.sampled_logprobs:
            _check_sampled(row, found)
        wrong = next(filter(None, (_wrong_id(each, 0, vocabulary_size) for each in found.top_token_ids)), "")
        if wrong:
            raise ProtocolError(f"target service: {wrong}")
        numbers = (
            found.top_logprobs,
            found.token_logprobs,
            found.raw_logprobs,
            found.processed_logprobs,
        )
        for logprob in chain(*numbers):
            # Rounding may leave one just above zero
            if not logprob < 0.001:
                raise ProtocolError(
                    f"target service: it sent the log probability {logprob:g}; it must be at most 0"
                )


def _check_most_probable(row: TargetRow, found: RowLogprobs, wanted: int) -> None:
    own_count = 1 + len(row.token_ids) if isinstance(row, SupportRow) else 1
    counts = len(found.top_token_ids), len(found.top_logprobs), len(found.token_logprobs)
    if counts != (wanted, wanted, own_count):
        raise ProtocolError(
            f"target service: a row came with {counts[0]} ids, {counts[1]} of their log probabilities and "
            f"{counts[2]} of its own tokens'; there must be {wanted}, {wanted} and {own_count}"
        )


def _check_sampled(row: TargetRow, found: RowLogprobs) -> None:
    wanted = len(own_token_ids(row))
    counts = len(found.raw_logprobs), len(found.processed_logprobs)
    if counts != (wanted, wanted):
        raise ProtocolError(
            f"target service: a row came with {counts[0]} raw and {counts[1]} processed log probabilities of its own "
            f"tokens; there must be {wanted} of each"
        )


def _wrong_id(token_id: int, minimum: int, vocabulary_size: int) -> str:
    if minimum <= token_id < vocabulary_size:
        return ""
    return f"it sent token id {token_id}; ids must be in 0..{vocabulary_size - 1}"


def _wrong_support(row: SupportRow, vocabulary_size: int) -> str:
    # -1 stands for no token outside the support; then the mass there does not count.
    outside = row.outside_mass if row.outside_token_id >= 0 else 0.0
    values = row.probs.tolist()
    mass = sum(values) + outside
    # A NaN makes the sum one, and comparisons with it are false. The sum may exceed 1: the support may name a token
    # twice.
    if not (min(values, default=0.0) >= 0.0 and outside >= 0.0 and 0.0 < mass < math.inf):
        return (
            f"a row's lowest probability is {np.min([outside, *values]):g} and their sum is {mass:g}; no probability "
            "may be negative, and the sum must be a positive number"
        )
    # A token's probability is at most the mass that holds it, before and after rounding.
    if row.outside_prob is not None and not 0.0 <= row.outside_prob <= outside:
        return (
            f"a row's token outside the support has the probability {row.outside_prob:g}; it must be between 0 and the "
            f"mass there, {outside:g}"
        )
    return _wrong_id(row.outside_token_id, -1, vocabulary_size)


def _wrong_statistics(statistics: RowStatistics, vocabulary_size: int) -> str:
    maximum = float(statistics.logits.max(initial=-math.inf))
    # Rounding may leave an entropy just below zero.
    for name, value in (("entropy", statistics.entropy), ("highest probability", statistics.max_prob)):
        if not math.isfinite(value):
            return f"a row's {name} is {value:g}; it must be a finite number"
    if not maximum < math.inf:
        return f"a row's highest logit in its support is {maximum:g}; it must be a number below infinity"
    return _wrong_id(statistics.argmax_token_id, 0, vocabulary_size)


def _wrong_logits(row: DenseRow, vocabulary_size: int) -> str:
    if row.logits.shape != (vocabulary_size,):
        return (
            f"a dense row holds {row.logits.size} logits; it must hold {vocabulary_size}, one for each token of the "
            "vocabulary"
        )
    # One pass is enough: max() returns NaN wherever there is one. Models forbid single tokens by minus infinity.
    maximum = float(row.logits.max())
    if not math.isfinite(maximum):
        return f"a dense row's highest logit is {maximum:g}; it must be a finite number"
    return ""


_Request = TargetOptions | VerifyStep | DraftedOutcomes
_Answer = wire.Answer | Pending | PassedStates
OnStates: TypeAlias = Callable[[PassedStates], None] | None
"""Takes the hidden states that a head apart reads, as they come."""

ASK_AGAIN_SECONDS = 2.0
"""An answer is asked for again after so long: where steps are short, none that is in time, and a stream pauses for less
than 5 s."""
_GREEDY = SamplingParams(temperature=0.0)
PROBE = "probe"
"""Request id of a probe."""
_PROBE_SECONDS = 30.0
"""Timeout of a probe. Probes repeat for as long as the target is set aside."""


_MAX_TOKENIZER_FILES = 16
"""Three are known."""


class RowChoice(NamedTuple):
    """The rows that a request needs."""

    rule: AcceptanceRule
    """Decides on them."""
    kind: RowKind
    vocabulary_size: int
    """The target's; ids in its answers must be below it, and dense rows hold as many logits."""


_NO_REQUEST = RowChoice(resolve(SpeculativeConfig(), _GREEDY), RowKind.TOKEN, 1 << 31)
"""A probe's: any token will do."""


def _read(content: bytes) -> Iterator[tuple[int, _Answer | Ending | ProtocolError]]:
    return wire.answers_from_proto(read_message(target_pb2.VerifyResponse, content))


def _words_of(token_ids: Sequence[int] | None) -> str:
    """Tokens in an error, of which a service may send many."""
    return "nothing" if token_ids is None else f"tokens {list(token_ids[:_SHOWN_TOKENS])}"


_SHOWN_TOKENS = 8


class TargetClient:
    """Calls one target service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = TargetServiceStub(channel)
        self.streams: Streams[_Request, _Answer] = Streams(
            service="target service",
            call=channel.stream_stream("/tandem.v1.TargetService/Verify"),
            write=wire.requests_to_proto,
            read=_read,
        )
        self.statistics: EngineStatistics | None = None
        """The latest figures of its engine, if it reports them."""
        self.rounds = MessageRounds()
        """Those that the latest message of the service answers. Its answers are read one after the other."""

    async def model_info(self) -> ModelInfo:
        """The target's model. Raises an OtherServiceError where a draft service answers."""
        with errors_of("target service"):
            async with recognize_others(self._channel, Role.TARGET):
                answer = await self._stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest())
        has_statistics = answer.HasField("statistics")
        self.statistics = statistics_from_proto(answer.statistics) if has_statistics else None
        return model_info_from_proto(answer.model_info)

    async def tokenizer_files(self) -> dict[str, bytes]:
        files: defaultdict[str, bytearray] = defaultdict(bytearray)
        size = 0
        with errors_of("target service"):
            async for part in self._stub.GetTokenizer(target_pb2.GetTokenizerRequest()):
                files[part.file_name] += part.content
                size += len(part.content)
                if size > MAX_TOKENIZER_BYTES or len(files) > _MAX_TOKENIZER_FILES:
                    raise ProtocolError(
                        f"target service: its tokenizer has {size} bytes in {len(files)} files and more; it must have "
                        f"at most {MAX_TOKENIZER_BYTES} in {_MAX_TOKENIZER_FILES}"
                    )
        return {name: bytes(content) for name, content in files.items()}

    async def probe(self) -> None:
        """Ask it to verify one token."""
        options = TargetOptions(PROBE, _GREEDY, max_length=2, prompt_length=1)
        sequence = TargetSequence(self, options, _NO_REQUEST, NO_OBSERVER)
        answering = asyncio.ensure_future(sequence.verify((0,), Proposal(1)))
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                while not (await asyncio.wait({answering}, timeout=ASK_AGAIN_SECONDS))[0]:
                    sequence.ask_again()
                await answering
                await sequence.finish()
        except TimeoutError:
            raise ServiceUnavailableError(
                f"target service: it did not answer a probe within {_PROBE_SECONDS:g} s"
            ) from None
        finally:
            answering.cancel()
            sequence.cancel()


@dataclass(slots=True, eq=False)
class _LedRounds:
    """The rounds that a target begins by itself, as far as their answers have come."""

    allowed: int = 0
    """How many it may begin behind the one that was asked for last."""
    unasked: deque[tuple[GoesOn, Verification]] = field(default_factory=deque)
    """Those that nobody has asked for yet and that are answered, in order, with what was announced of each."""
    next: GoesOn | None = None
    """How it goes on behind the latest answer; None: it does not, or nothing is known of it."""

    @property
    def first(self) -> GoesOn | None:
        """The first round that nobody has asked for yet; None if the target may not begin any."""
        if self.unasked:
            return self.unasked[0][0]
        return self.next if self.allowed > 0 else None

    def continues(self, step: VerifyStep) -> bool:
        """True if the target goes on with just this step by itself, once it may."""
        announced = self.unasked[0][0] if self.unasked else self.next
        if announced is None or (announced.own_tokens is None) != (step.own_tokens is None):
            return False
        delta = Delta(step.delta.base_length, tuple(step.delta.token_ids))
        if delta != announced.delta:
            return False
        if step.own_tokens is not None:
            return len(delta.token_ids) == 1
        return step.row_count == len(delta.token_ids) and step.row_kind is RowKind.TOKEN


class TargetSequence(StreamedSequence[_Request, _Answer]):
    """Asks a target service for rows, for as long as the sequence stays there."""

    def __init__(
        self,
        client: TargetClient,
        options: TargetOptions,
        rows: RowChoice,
        observer: StreamObserver,
        on_states: OnStates = None,
    ) -> None:
        super().__init__(client.streams, observer)
        self._on_states = on_states
        self._rounds = client.rounds
        self._options = replace(options, traceparent=observer.traceparent)
        self._rows = rows
        self._asked: tuple[VerifyStep, Proposal | OwnHead] | None = None
        """Set while an answer is awaited."""
        self._most_own_tokens = 0
        """The most that the target's own head was ever asked for."""
        self._answer: asyncio.Future[Verification] | None = None
        self._serial = 0
        """Of the last step."""
        self._next_label = 0, 0
        """Of the answer that follows: the serial of the step that was asked, and how many steps behind it."""
        self.pending: Pending | None = None
        """The target's word on the step that was last asked again; None before it has come."""
        self._led = _LedRounds()
        self._leading = Leading()
        """With what the target has of the draft."""
        self._unwanted = 0
        """Answers that may come of a lead that has ended, each of which began another round."""
        self.stats = LeadStats()
        """Rounds that the target began by itself."""
        self.is_new = True
        """True before the first answer."""
        self.cache: CacheCounts | None = None
        """Hits and preemptions of the target's cache for the sequence; None where it reports none."""

    async def verify(
        self, committed: Sequence[int], asked: Proposal | OwnHead, lead: Lead = NO_LEAD
    ) -> Verification:
        """The target's row at each position of the proposal, and at the one after it.

        Args:
            committed: The prompt's and the completion's tokens, a list that grows.
            asked: The tokens to verify, or that the target's own head is to propose them.
            lead: How far the target may go on by itself behind them.

        Raises:
            TandemError: Where the service failed, refused, or sent an invalid answer: the sequence is of no further
                use.
        """
        self._committed = committed
        self._serial += 1
        step = self._step(committed, asked, lead)
        if self.error is not None:
            raise self.error
        self._asked = step, asked
        self._answer = asyncio.get_running_loop().create_future()
        self.send(*((self._options, step) if self.is_new else (step,)))
        if not self._led.continues(step):
            self._end_lead()
            self._next_label = self._serial, 0
        # A smaller lead does not reach the target before it has begun what an earlier step allowed.
        self._led.allowed = max(step.lead, self._led.allowed - 1)
        if self._led.unasked:
            self._answer.set_result(self._led.unasked.popleft()[1])
        verification = await self._answer
        self.goes_on()
        self.is_new = False
        self.stats.rounds += verification.led > 0
        if isinstance(asked, OwnHead) and verification.proposal is not None:
            self._remote.extend(verification.proposal.token_ids)
        return verification

    def _step(self, committed: Sequence[int], asked: Proposal | OwnHead, lead: Lead) -> VerifyStep:
        rule, kind, _ = self._rows
        if isinstance(asked, OwnHead):
            delta = self._remote.delta_to(committed, with_last=True)
            self._most_own_tokens = max(self._most_own_tokens, asked.max_tokens)
            return rule.own_step(delta, kind, self._serial, lead.credits, asked.max_tokens)
        delta = self._remote.delta_to(committed, asked.token_ids)
        return rule.step(delta, asked, kind, self._serial, lead)

    def find_led(self, committed: Sequence[int]) -> Proposal | OwnHead | None:
        """The proposal of the round that the target has begun by itself behind these tokens; None where it has begun
        none there. What it has begun elsewhere is taken back by the next step."""
        first = self._led.first
        if first is None:
            return None
        delta, own_tokens = first
        base_length = delta.base_length + 1
        if base_length != len(committed) or delta.token_ids[0] != committed[-1]:
            return None
        if own_tokens is not None:
            return OwnHead(own_tokens)
        return Proposal(base_length, tuple(delta.token_ids[1:]))

    def ask_again(self) -> None:
        """Ask once more for the answer that is awaited. The target repeats it, says that the step is pending, or ends
        the sequence, which it does not know."""
        if self._asked is not None:
            self.pending = None
            self.send(self._asked[0])

    def pass_on(self, drafted: DraftedOutcomes) -> None:
        """Tell the target what the draft proposes after outcomes of the round in progress."""
        if self._asked is not None and self._leading.add(drafted):
            self.send(drafted)

    async def finish(self) -> None:
        self._end_lead()
        if not self.is_new:
            await super().finish()

    def cancel(self, error: TandemError | None = None) -> None:
        self._end_lead()
        super().cancel(error)

    def _end_lead(self) -> None:
        """Drop what the target did by itself. It may have begun another round, and more until it learns of it."""
        led = self._led
        left = led.allowed - len(led.unasked)
        begins_more = led.next is not None and left > 0
        self._led = _LedRounds()
        self._unwanted = left - 1 if begins_more else 0
        self.stats.wasted += len(led.unasked) + begins_more

    def take(self, answer: _Answer) -> None:
        """Take an answer of the service.

        All sequences that a message answers take their answers before any of them goes on, so that their rule can
        decide all of their rounds at once.
        """
        if isinstance(answer, PassedStates):
            if self._on_states is not None:
                self._on_states(answer)
            return
        if isinstance(answer, Pending):
            if answer.serial == self._serial:
                self.pending = answer
            return
        if not self._is_next(answer):
            return
        if answer.led > 0:
            self._take_led(answer)
            return
        if self._asked is None or self._answer is None or self._answer.done():
            raise ProtocolError("target service: it answered what nobody had asked for")
        step, asked = self._asked
        base_length = step.delta.length - step.row_count + 1
        if answer.base_length != base_length:
            raise ProtocolError(
                f"target service: it answered for {answer.base_length} tokens; it was asked for {base_length}"
            )
        self._answer.set_result(self._read(answer, step, asked))

    def _read(self, answer: wire.Answer, step: VerifyStep, asked: Proposal | OwnHead) -> Verification:
        """The answer to a step, with all that it holds checked. From it on the target may go on by itself."""
        proposal = asked if isinstance(asked, Proposal) else self._own_proposal(answer, step)
        if isinstance(asked, OwnHead):
            step = self._rows.rule.step_with(step, proposal)
        verification = answer.verification(step)
        self.cache = answer.cache or self.cache
        check_rows(verification, self._rows.vocabulary_size, with_statistics=step.with_statistics)
        if step.row_kind is not RowKind.DENSE:
            check_logprobs(verification, self._options, self._rows.vocabulary_size)
        self._led.next = self._check_announced(step, verification, proposal)
        if step.row_kind is RowKind.SUPPORT and (decide := self._rows.rule.decide_many) is not None:
            own = Round(proposal, verification, self._options.sampling)
            return self._rounds.add(answer.message, decide, own)
        return verification

    def _own_proposal(self, answer: wire.Answer, step: VerifyStep) -> Proposal:
        """The proposal of the target's own head that an answer is for."""
        proposal = answer.proposal
        if proposal is None:
            raise ProtocolError("target service: it sent no proposal of its own head; the step asked for one")
        rule, _, vocabulary_size = self._rows
        check_proposal(
            "target service",
            proposal,
            step.delta.length,
            self._most_own_tokens,
            vocabulary_size,
            with_token_logits=rule.strategy.needs_token_logits,
        )
        return proposal

    def _is_next(self, answer: wire.Answer) -> bool:
        """True for the answer that follows the last. Others are passed over: one that is here already, one of a lead
        that has ended, and one behind another that was lost, with which it is repeated."""
        serial = self._next_label[0]
        if answer.serial > self._serial or (answer.serial > serial and answer.led > 0):
            raise ProtocolError(
                f"target service: it answered step {answer.serial}, and {answer.led} behind it; the last one that it "
                f"was asked for is step {self._serial}, by the lead of step {serial}"
            )
        if answer.serial > serial:
            # It has not gone on by itself after all
            self._end_lead()
            self._next_label = answer.serial, 0
        elif answer.serial < serial and answer.led > 0:
            self._count_unwanted()
        if (answer.serial, answer.led) != self._next_label:
            return False
        self._next_label = answer.serial, answer.led + 1
        return True

    def _take_led(self, answer: wire.Answer) -> None:
        led = self._led
        announced = led.next
        if announced is None:
            self._count_unwanted()
            return
        is_awaited = self._answer is not None and not self._answer.done()
        if not is_awaited and len(led.unasked) >= led.allowed:
            raise ProtocolError("target service: it went further by itself than it was allowed")
        verification = self._read_led(answer, announced)
        if self._answer is not None and is_awaited:
            self._answer.set_result(verification)
        else:
            led.unasked.append((announced, verification))

    def _read_led(self, answer: wire.Answer, announced: GoesOn) -> Verification:
        """The answer to a step that the target had announced."""
        delta, own_tokens = announced
        base_length = delta.base_length + 1
        if answer.base_length != base_length:
            raise ProtocolError(
                f"target service: it went on behind {answer.base_length} tokens; it had said behind {base_length}"
            )
        if own_tokens is not None:
            step = self._rows.rule.own_step(delta, self._rows.kind, 0, 1, own_tokens)
            return self._read(answer, step, OwnHead(own_tokens))
        proposed = tuple(delta.token_ids[1:])
        came = None if answer.proposal is None else answer.proposal.token_ids
        if came != proposed:
            raise ProtocolError(
                f"target service: it went on behind {base_length} tokens with {_words_of(came)}; it had said with "
                f"{_words_of(proposed)}"
            )
        step = VerifyStep(delta, RowKind.TOKEN, len(delta.token_ids), lead=1)
        return self._read(answer, step, Proposal(base_length, proposed))

    def _count_unwanted(self) -> None:
        """An answer has come of a lead that has ended."""
        self.stats.wasted += self._unwanted > 0
        self._unwanted = max(self._unwanted - 1, 0)

    def _check_announced(self, step: VerifyStep, answer: Verification, proposal: Proposal) -> GoesOn | None:
        """How the target says that it goes on behind this answer, as far as it may."""
        announced = answer.goes_on
        if announced is None:
            return None
        if step.own_tokens is not None:
            # Whether the outcome is the right one shows when the rule has decided: another one is taken back.
            self._check_outcome(announced, answer, proposal)
            return announced
        said = announced.delta
        expected = self._leading.find(read_outcome(step, answer), self._options)
        if expected is None:
            raise ProtocolError("target service: it goes on where it may not")
        delta = expected.delta
        # It may have known fewer of the draft's tokens when it decided.
        known = tuple(delta.token_ids[: len(said.token_ids)])
        if (said.base_length, said.token_ids) != (delta.base_length, known):
            raise ProtocolError(
                f"target service: it goes on behind {said.base_length} tokens with {_words_of(said.token_ids)}; by its "
                f"rows, and by what the draft proposes, it may behind {delta.base_length} with "
                f"{_words_of(delta.token_ids)}"
            )
        return announced

    def _check_outcome(self, announced: GoesOn, answer: Verification, proposal: Proposal) -> None:
        delta, own_tokens = announced
        accepted = delta.base_length - answer.base_length
        if not 0 <= accepted <= len(proposal):
            raise ProtocolError(
                f"target service: it goes on behind {accepted} tokens of a proposal of {len(proposal)}"
            )
        if own_tokens is None or own_tokens > self._most_own_tokens:
            raise ProtocolError(
                f"target service: it goes on with {own_tokens} tokens of its own head; at most {self._most_own_tokens} "
                "were asked for"
            )
        if wrong := _wrong_id(delta.token_ids[0], 0, self._rows.vocabulary_size):
            raise ProtocolError(f"target service: {wrong}")

    def notify(self) -> None:
        if self.error is not None and self._answer is not None and not self._answer.done():
            self._answer.set_exception(self.error)

"""Streams of draft and target services, each of which carries the sequences of one coordinator.

Answers that come up while a message is written go into the next one together. So a step of an engine that answers
sixteen sequences makes one message, and a single answer is sent at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from tandem.errors import InvalidRequestError, ProtocolError, ServiceUnavailableError
from tandem.model.types import Cancel, Finish
from tandem.rpc.outbox import Outbox
from tandem.serving.interceptors import RunningCalls, ended_by
from tandem.wire.status import Ending

OptionsT = TypeVar("OptionsT")
StepT = TypeVar("StepT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Repetition(Generic[AnswerT]):
    """How a service answers steps that are asked again."""

    serial: Callable[[Any], int]
    """Serial of a step; 0 for one that is not asked again, and for other requests."""
    label: Callable[[AnswerT, int, int], AnswerT]
    """The answer with the serial of the step that was asked, and how many steps behind it it is for."""
    is_kept: Callable[[AnswerT], bool]
    """False for an answer that is too large to be kept: its step is taken again."""
    pending: Callable[[int, bool], AnswerT]
    """Says that a step is pending, and whether it waits for room."""


class RecentAnswers(Generic[StepT, AnswerT]):
    """The answers of a sequence from the last step on. A message may be lost on its way, and then they are repeated."""

    def __init__(self, repetition: Repetition[AnswerT]) -> None:
        self._repetition = repetition
        self._arrived = 0
        """Serial of the last step that has arrived."""
        self._begun = 0
        """Serial of the last step that has begun."""
        self._label = 0, 0
        """Of the last answer."""
        self._answers: deque[AnswerT] = deque()
        """To the last step and, in order, those that follow by themselves."""
        self._before = self._answers
        """As they were when the last step began."""
        self._must_repeat_step = False
        """True if the last step was answered and the answer is not kept."""

    def is_repeated(self, step: StepT) -> bool:
        """True for a step that has arrived before."""
        serial = self._repetition.serial(step)
        was_there = serial > 0 and serial == self._arrived
        self._arrived = serial
        return was_there

    def begin(self, step: StepT) -> None:
        self._begun = self._repetition.serial(step)
        self._before = self._answers
        self._answers = deque()
        self._must_repeat_step = False

    def confirm(self) -> None:
        """The step that has begun is the first that followed the one before by itself."""
        self._answers = self._before
        if self._answers:
            self._answers.popleft()

    def answer_step(self) -> None:
        """The next answer is that of the step which has begun; those after it follow by themselves."""
        self._label = self._begun, -1

    def add(self, answer: AnswerT) -> AnswerT:
        """Label an answer and keep it."""
        serial, led = self._label
        self._label = serial, led + 1
        labelled = self._repetition.label(answer, *self._label)
        if self._repetition.is_kept(labelled):
            self._answers.append(labelled)
        else:
            self._must_repeat_step = True
        return labelled

    def recall(self, *, is_waiting: bool) -> Sequence[AnswerT]:
        """The answers to send when the last step is asked again; none where the step must be taken again."""
        if self._begun == self._arrived and (self._answers or self._must_repeat_step):
            return self._answers
        return [self._repetition.pending(self._arrived, is_waiting)]


@dataclass(eq=False)
class ServedSequence(Generic[OptionsT, StepT, AnswerT]):
    """One sequence of a stream, as the service sees it."""

    options: OptionsT
    _send: Callable[[AnswerT], None]
    _room: Callable[[], Awaitable[None]]
    _recent: RecentAnswers[StepT, AnswerT] | None = None
    """None for a service whose steps are not asked again."""
    task: asyncio.Task[None] = field(init=False)
    """Serves it; set by its stream."""
    kept_tokens: int = 0
    """Number of first tokens that the coordinator keeps, known once its steps have ended."""
    on_note: Callable[[Any], None] = lambda _: None
    """Takes what a step in progress may need to know; an InvalidRequestError ends the sequence."""
    is_waiting: Callable[[], bool] = lambda: False
    """True while the step in progress waits for room that other sequences have."""
    _arrived: asyncio.Queue[StepT | Finish | Exception] = field(default_factory=asyncio.Queue)
    """Requests of the coordinator; an error ends the sequence."""
    _pushing: asyncio.Task[None] | None = None

    async def steps(self, pushed: asyncio.Queue[Any] | None = None) -> AsyncIterator[StepT]:
        """Yield the steps of the sequence, until its Finish. `pushed` brings answers to send unasked, until then; an
        error ends the sequence."""
        if pushed is not None:
            self._pushing = asyncio.create_task(self._push(pushed))
        while True:
            request = await self._arrived.get()
            self._arrived.task_done()
            if isinstance(request, Finish):
                self.kept_tokens = request.token_count
                return
            if isinstance(request, Exception):
                raise request
            if self._recent is not None:
                self._recent.begin(request)
            yield request

    def confirm(self) -> None:
        """The step that `steps` has yielded was taken before it was asked for: its answer follows by itself, or has."""
        if self._recent is not None:
            self._recent.confirm()

    async def answer(self, answer: AnswerT) -> None:
        """Answer the step that `steps` has yielded."""
        if self._recent is not None:
            self._recent.answer_step()
        self.say(answer)
        await self._room()

    def say(self, answer: AnswerT) -> None:
        """Send an answer that nobody has asked for yet, behind those before it."""
        self._send(answer if self._recent is None else self._recent.add(answer))

    def send_beside(self, answer: AnswerT) -> None:
        """Send what answers no step, behind the answers before it. It is not repeated with them."""
        self._send(answer)

    def repeat(self, step: Any) -> bool:
        """Say again what there is to say of a step that was asked before; false for any other request."""
        if self._recent is None or not self._recent.is_repeated(step):
            return False
        if answers := self._recent.recall(is_waiting=self.is_waiting()):
            for answer in answers:
                self._send(answer)
        else:
            self.tell(step)
        return True

    async def may_arrive(self) -> None:
        """Wait while too many requests do. A coordinator sends one, and its Finish."""
        if self._arrived.qsize() >= 8:
            await self._arrived.join()

    def note(self, note: Any) -> None:
        """The coordinator says what a step in progress may need to know."""
        try:
            self.on_note(note)
        except InvalidRequestError as error:
            self.tell(error)

    def tell(self, request: StepT | Finish | Exception) -> None:
        """Queue a request, or an error that ends the sequence."""
        self._arrived.put_nowait(request)

    def close(self) -> None:
        while not self._arrived.empty():
            self._arrived.get_nowait()
            self._arrived.task_done()
        if self._pushing is not None:
            self._pushing.cancel()

    async def _push(self, pushed: asyncio.Queue[Any]) -> None:
        try:
            while not isinstance(answer := await pushed.get(), Exception):
                await self.answer(answer)
        except Exception as error:  # noqa: BLE001 - it ends the sequence, as an error that is pushed
            answer = error
        self.tell(answer)


@dataclass(frozen=True, slots=True)
class Translation(Generic[OptionsT, StepT, AnswerT]):
    """Conversions of a service's messages."""

    options: type[OptionsT]
    """Options with which sequences are opened."""
    read: Callable[[Any], Iterable[tuple[int, Any]]]
    """Reads the requests of a message, by number of their sequence, or what is wrong with one. Raises ProtocolError
    where the message holds too much, or what concerns no sequence."""
    write: Callable[[Iterable[tuple[int, AnswerT | Ending]]], Any]
    notes: type | tuple[()] = ()
    """Requests that do not wait for the step in progress, and are not answered."""
    repetition: Repetition[AnswerT] | None = None
    """None: steps are not asked again."""


class SequenceStreams:
    """A server's streams. Each of their sequences counts as a call."""

    def __init__(self) -> None:
        self.calls = RunningCalls()
        """Those of the server."""
        self.instance_id = uuid.uuid4().hex
        """See `ModelInfo`."""

    async def serve(
        self,
        requests: AsyncIterator[Any],
        serve_sequence: Callable[[ServedSequence[OptionsT, StepT, AnswerT]], Awaitable[None]],
        translation: Translation[OptionsT, StepT, AnswerT],
    ) -> AsyncGenerator[Any]:
        """Serve the sequences of a stream; yield messages, as few as possible."""
        stream = _Stream(self.calls, serve_sequence, translation)
        reading = asyncio.create_task(stream.read(requests))
        try:
            while taken := await stream.answers():
                yield translation.write(taken)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(*stream.cancel(), return_exceptions=True)


@dataclass(eq=False)
class _Stream(Generic[OptionsT, StepT, AnswerT]):
    _calls: RunningCalls
    _serve_sequence: Callable[[ServedSequence[OptionsT, StepT, AnswerT]], Awaitable[None]]
    _translation: Translation[OptionsT, StepT, AnswerT]
    _running: dict[int, ServedSequence[OptionsT, StepT, AnswerT]] = field(default_factory=dict)
    _latest: int = 0
    """The highest number that a sequence ever had."""
    _outbox: Outbox[AnswerT | Ending] = field(default_factory=Outbox)
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream's writer has something to do."""
    _less: asyncio.Event = field(default_factory=asyncio.Event)
    _is_read: bool = False

    async def read(self, requests: AsyncIterator[Any]) -> None:
        """Distribute received messages until the stream ends."""
        try:
            async for message in requests:
                for number, request in self._translation.read(message):
                    if (sequence := self._running.get(number)) is None:
                        self._take_unknown(number, request)
                    elif isinstance(request, Cancel):
                        sequence.task.cancel()
                    elif isinstance(request, self._translation.notes):
                        sequence.note(request)
                    elif not sequence.repeat(request):
                        if isinstance(request, self._translation.options):
                            request = InvalidRequestError("the sequence was opened twice")
                        await sequence.may_arrive()
                        sequence.tell(request)
            await self._end_unfinished()
        except (ProtocolError, InvalidRequestError) as error:
            self.cancel()
            raise InvalidRequestError(str(error)) from None
        except Exception:
            # Sequences that nobody reads for would wait for ever
            self.cancel()
            raise
        finally:
            self._is_read = True
            self._more.set()

    async def _end_unfinished(self) -> None:
        if self._running:
            # A cancelled client can look like a clean end: the cancellation comes a little later
            await asyncio.sleep(0.05)
        for sequence in self._running.values():
            sequence.tell(InvalidRequestError("the stream ended without finish"))

    async def answers(self) -> list[tuple[int, AnswerT | Ending]]:
        """The answers of the next message, each with its sequence's number; none once all are sent."""
        while not (taken := self._outbox.take()) and (self._running or not self._is_read):
            self._less.set()
            self._more.clear()
            await self._more.wait()
        self._less.set()
        return taken

    def cancel(self) -> list[asyncio.Task[None]]:
        tasks = [sequence.task for sequence in self._running.values()]
        for task in tasks:
            task.cancel()
        return tasks

    def _take_unknown(self, number: int, request: Any) -> None:
        """Take a request for a sequence that is not there: it begins, or has ended, or its Open was lost."""
        repetition = self._translation.repetition
        if repetition is not None and repetition.serial(request) > 0:
            sentence = "the sequence is not known here: it has ended, or it begins without open"
            self._say(number, ended_by(ServiceUnavailableError(sentence)))
        elif number > self._latest and not isinstance(request, Cancel):
            # One that has ended may be asked once more before that is known.
            self._begin(number, request)

    def _begin(self, number: int, request: OptionsT | StepT | Finish | InvalidRequestError) -> None:
        self._latest = number
        repetition = self._translation.repetition
        if isinstance(request, InvalidRequestError):
            self._say(number, ended_by(request))
        elif not isinstance(request, self._translation.options):
            self._say(number, ended_by(InvalidRequestError("the sequence begins without open")))
        else:
            recent = None if repetition is None else RecentAnswers[StepT, AnswerT](repetition)
            sequence = ServedSequence[OptionsT, StepT, AnswerT](
                request, partial(self._say, number), self._room, recent
            )
            self._running[number] = sequence
            sequence.task = asyncio.create_task(self._run(number, sequence))
            sequence.task.add_done_callback(lambda _: self._is_over(number))

    async def _run(self, number: int, sequence: ServedSequence[OptionsT, StepT, AnswerT]) -> None:
        try:
            self._calls.check_room()
            async with self._calls.running():
                await self._serve_sequence(sequence)
            ending = Ending()
        except Exception as error:  # noqa: BLE001 - any error ends only one sequence
            ending = ended_by(error)
        self._say(number, ending)

    def _is_over(self, number: int) -> None:
        self._running.pop(number).close()
        self._more.set()

    def _say(self, number: int, answer: AnswerT | Ending) -> None:
        self._outbox.put(number, answer)
        self._more.set()

    async def _room(self) -> None:
        while self._outbox.waiting_bytes >= (1 << 22):
            self._less.clear()
            await self._less.wait()

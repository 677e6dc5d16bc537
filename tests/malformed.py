"""Messages that no peer should send: those of valid calls with changes, and others of the same types."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.model.types import (
    AheadBudget,
    Cancel,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    Finish,
    Grammar,
    GrammarKind,
    LogitAdjustments,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetOptions,
    VerifyStep,
)
from tandem.v1 import admin_pb2, draft_pb2, generation_pb2, target_pb2
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire

T = TypeVar("T")

_INT32 = st.sampled_from([0, 1, -1, 2, 5, 64, 2047, 2048, 2**31 - 1, -(2**31)])
_INT64 = st.one_of(_INT32, st.sampled_from([2**63 - 1, -(2**63)]))
_DOUBLE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e308, 5e-324]), st.floats()
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: _DOUBLE,
    FieldDescriptor.TYPE_FLOAT: _DOUBLE,
    FieldDescriptor.TYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=12),
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 77, -1]),
}
_MAX_REPEATED = 6


@st.composite
def changed(draw: st.DrawFn, valid: Message) -> Message:
    """The message with some of its fields, however deep, set to something else."""
    message = type(valid)()
    message.CopyFrom(valid)
    fields = [field for field in message.DESCRIPTOR.fields if _is_worth_it(message, field)]
    for field in draw(st.lists(st.sampled_from(fields), max_size=3)) if fields else ():
        _set(draw, message, field)
    return message


def _is_worth_it(message: Message, field: Any) -> bool:
    """All fields, but of a choice mostly the part that was chosen."""
    chosen = field.containing_oneof and message.WhichOneof(field.containing_oneof.name)
    return not chosen or chosen == field.name


def _set(draw: st.DrawFn, message: Any, field: Any) -> None:
    if field.is_repeated:
        message.ClearField(field.name)
        values = getattr(message, field.name)
        for _ in range(draw(st.integers(0, _MAX_REPEATED))):
            if field.message_type is None:
                values.append(draw(_SCALARS[field.type]))
            elif field.message_type.GetOptions().map_entry:
                entry = _arbitrary(draw, field.message_type)
                values[entry.key] = entry.value
            else:
                values.add().CopyFrom(_arbitrary(draw, field.message_type))
    elif field.message_type is None:
        setattr(message, field.name, draw(_SCALARS[field.type]))
    elif draw(st.integers(0, 4)) == 0:
        message.ClearField(field.name)
    else:
        part = getattr(message, field.name)
        part.CopyFrom(draw(changed(part)))


def _arbitrary(draw: st.DrawFn, descriptor: Any) -> Any:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.booleans()):
            _set(draw, message, field)
    return message


class Change(Enum):
    """A change of one value."""

    OTHER = "another"
    MORE = "one more"
    LESS = "one less"
    GONE = "none"
    TWICE = "twice the same"


class Alteration(NamedTuple):
    """A change of one value in a message that comes later."""

    place: int
    """Chooses the field, and one of its values."""
    change: Change
    others: dict[int, Any]
    """Another value of each type."""

    def apply(self, message: Message) -> None:
        values_of: dict[str, list[tuple[Any, Any, int | None]]] = defaultdict(list)
        for owner, field, index in _values(message):
            values_of[field.full_name].append((owner, field, index))
        if not values_of:
            return
        found = values_of[sorted(values_of)[self.place % len(values_of)]]
        owner, field, index = found[self.place // len(values_of) % len(found)]
        if index is None:
            if self.change is Change.GONE:
                owner.ClearField(field.name)
            else:
                with suppress(ValueError):  # no number of that type
                    setattr(owner, field.name, self._changed(field, getattr(owner, field.name)))
            return
        values = getattr(owner, field.name)
        match self.change:
            case Change.GONE:
                del values[index]
            case Change.TWICE:
                values.insert(index, values[index])
            case _:
                with suppress(ValueError):
                    values[index] = self._changed(field, values[index])

    def _changed(self, field: Any, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and self.change is Change.MORE:
            return value + 1
        if is_number and self.change is Change.LESS:
            return value - 1
        if is_number and self.change is Change.TWICE:
            return value + value
        return self.others[field.type]


def _values(message: Message) -> Iterator[tuple[Any, Any, int | None]]:
    """The values of a message, however deep: the message and the field that hold each, and its place in a list."""
    for field, value in message.ListFields():
        if field.message_type is None:
            for index in range(len(value)) if field.is_repeated else (None,):
                yield message, field, index
        elif not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                yield from _values(part)


def alterations() -> st.SearchStrategy[Alteration]:
    return st.builds(
        Alteration, st.integers(0, 1 << 16), st.sampled_from(Change), st.fixed_dictionaries(_SCALARS)
    )


@st.composite
def damaged(draw: st.DrawFn, valid: Message) -> bytes:
    """The message's bytes with some of them changed, left out or added."""
    content = bytearray(valid.SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        match draw(st.integers(0, 3)):
            case 0:
                del content[place:]
            case 1:
                content[place:place] = draw(st.binary(max_size=8))
            case _ if place < len(content):
                content[place] ^= draw(st.integers(1, 255))
            case _:
                pass
    return bytes(content)


@st.composite
def arbitrary(draw: st.DrawFn, descriptor: Any) -> Message:
    """Any message of a type."""
    message: Message = _arbitrary(draw, descriptor)
    return message


def contents(valid: Message) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.binary(max_size=64),
        arbitrary(valid.DESCRIPTOR).map(lambda message: message.SerializeToString()),
        damaged(valid),
        changed(valid).map(lambda message: message.SerializeToString()),
    )


@st.composite
def streams(draw: st.DrawFn, valid: Sequence[Message]) -> list[bytes]:
    """Streams that may come in place of a valid one: other messages, another order, some twice, some missing."""
    order = draw(
        st.one_of(
            st.just(list(range(len(valid)))),
            st.lists(st.integers(0, len(valid) - 1), max_size=len(valid) + 2),
        )
    )
    return [
        valid[index].SerializeToString() if draw(st.integers(0, 2)) == 0 else draw(contents(valid[index]))
        for index in order
    ]


SAMPLING = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=3)
ADJUSTMENTS = LogitAdjustments({3: 1.0}, 2, (4,), (3, 5), ((6, 7),))
DELTA = Delta(0, [1, 2, 3])
NEXT_DELTA = Delta(3, [4, 5])
LAST_DELTA = Delta(5, [6, 7])
SUPPORTS = np.array([4, 9]), np.array([5, 8])
WITNESS = 1 << 30
"""The sequence behind all others on a stream: it shows that the stream still serves."""
UNKNOWN_SEQUENCE = 3


def _proposing(*requests: tuple[int, Any]) -> tuple[Message, ...]:
    return tuple(draft_wire.requests_to_proto([request]) for request in requests)


def _verifying(*requests: tuple[int, Any]) -> tuple[Message, ...]:
    return tuple(target_wire.requests_to_proto([request]) for request in requests)


VALID: dict[str, tuple[Message, ...]] = {
    "Generate": (
        generation_pb2.GenerateRequest(text="def f(", max_tokens=3, temperature=0.5, seed=1, stop=["\n\n"]),
    ),
    "GenerateBatch": tuple(
        generation_pb2.GenerateBatchRequest(
            index=index,
            request=generation_pb2.GenerateRequest(
                text="def f(", max_tokens=2, seed=index, sampled_logprobs=True
            ),
        )
        for index in range(3)
    ),
    "RenderChat": (
        generation_pb2.RenderChatRequest(
            messages=[generation_pb2.ChatMessage(role="user", content="What is it?")]
        ),
    ),
    "UpdateConfig": (admin_pb2.UpdateConfigRequest(values={"num_speculative_tokens": "3"}),),
    "DrainReplica": (admin_pb2.DrainReplicaRequest(address="127.0.0.1:1"),),
    "ResumeReplica": (admin_pb2.ResumeReplicaRequest(address="127.0.0.1:1"),),
    "MapVocabulary": (
        draft_pb2.MapVocabularyRequest(tokenizer_hash="0a", vocabulary_size=64, eos_token_ids=[1]),
        draft_pb2.MapVocabularyRequest(content=b"{}"),
    ),
    "Propose": _proposing(
        (
            1,
            DraftOptions("r", SAMPLING, 40, row_kind=RowKind.SUPPORT, draft_top_k=8, ahead=AheadBudget(4, 2)),
        ),
        (2, DraftOptions("s", SAMPLING, 40, grammar=Grammar(GrammarKind.REGEX, "[a-f]+"))),
        (1, ProposeStep(DELTA, 2)),
        (2, ProposeStep(DELTA, 2)),
        (1, ProposeStep(NEXT_DELTA, 3, AheadBudget(2, 2))),
        (1, ProposeStep(LAST_DELTA, 0, AheadBudget(2, 2), proposed_count=1)),
        (1, Finish(5)),
        (UNKNOWN_SEQUENCE, Cancel()),
    ),
    "Verify": _verifying(
        (1, TargetOptions("r", SAMPLING, 40, prompt_length=3, adjustments=ADJUSTMENTS, end_token_ids=(4,))),
        (2, TargetOptions("s", SAMPLING, 40, grammar=Grammar(GrammarKind.REGEX, "[a-f]+"))),
        (1, VerifyStep(DELTA, RowKind.TOKEN, 1, serial=1, lead=2)),
        (1, DraftedOutcomes(3, 0, (4, 6), (0, 0), (4, 5))),
        (2, VerifyStep(DELTA, RowKind.DENSE, 2, serial=1)),
        (1, VerifyStep(NEXT_DELTA, RowKind.SUPPORT, 3, SUPPORTS, with_statistics=True, serial=2)),
        (1, Finish(5)),
        (UNKNOWN_SEQUENCE, Cancel()),
    ),
}
"""The messages of a valid call of each method that takes any."""
WITNESSES: dict[str, tuple[Message, ...]] = {
    "Propose": _proposing(
        (WITNESS, DraftOptions("w", SAMPLING, 40)), (WITNESS, ProposeStep(DELTA, 2)), (WITNESS, Finish(3))
    ),
    "Verify": _verifying(
        (WITNESS, TargetOptions("w", SAMPLING, 40)),
        (WITNESS, VerifyStep(DELTA, RowKind.TOKEN, 1)),
        (WITNESS, Finish(3)),
    ),
}
"""Of each method that serves sequences, one that begins when all that is wrong has been sent."""


class Call(NamedTuple):
    """A method, and the messages of a valid call."""

    name: str
    path: str
    messages: tuple[Message, ...]
    is_stream: bool
    """True if the caller sends a stream of messages."""
    answer: type[Message]


def _calls_of(service: Any) -> tuple[Call, ...]:
    return tuple(
        Call(
            method.name,
            f"/{service.full_name}/{method.name}",
            VALID.get(method.name, (GetMessageClass(method.input_type)(),)),
            method.client_streaming,
            GetMessageClass(method.output_type),
        )
        for method in service.methods
    )


CALLS: dict[str, tuple[Call, ...]] = {
    "generation": _calls_of(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]),
    "admin": _calls_of(admin_pb2.DESCRIPTOR.services_by_name["AdminService"]),
    "draft": _calls_of(draft_pb2.DESCRIPTOR.services_by_name["DraftService"]),
    "target": _calls_of(target_pb2.DESCRIPTOR.services_by_name["TargetService"]),
}
"""All methods of each service."""
MAIN_CALLS = {"generation": "Generate", "admin": "UpdateConfig", "draft": "Propose", "target": "Verify"}
"""The method of each service whose messages say most. Half of the calls are to it."""


def main_call(service: str) -> Call:
    return next(call for call in CALLS[service] if call.name == MAIN_CALLS[service])


Attempt = tuple[Call, list[bytes]]
"""A call with other messages than valid ones."""


def attempts(service: str) -> st.SearchStrategy[Attempt]:
    """Calls with wrong messages."""
    return st.one_of(st.just(main_call(service)), st.sampled_from(CALLS[service])).flatmap(_attempt)


def _attempt(call: Call) -> st.SearchStrategy[Attempt]:
    single = contents(call.messages[0]).map(lambda content: [content])
    sent = streams(call.messages) if call.is_stream else single
    return sent.map(lambda messages: (call, messages))


def drawn(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """So many examples, the same ones in every run."""
    found: list[T] = []

    @settings(
        phases=[Phase.generate],
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(example: T) -> None:
        found.append(example)

    keep()
    return found


CALL_SECONDS = 30.0
"""Bound on a hang. A step on a busy machine takes a tenth of a second."""
_ENOUGH = 4
"""Answers after which a call without sequences is valid, and is cancelled: it may run for long."""
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_ENDINGS = {code.value[0] for code in (*_REFUSALS, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)}
"""Codes with which a sequence may end. UNAVAILABLE: a step is asked again of a sequence that is not known."""
_WORDS_OF_OURS = ("Traceback", "Error:", "site-packages", ".py", "0x")
"""Words that must not appear in errors for callers."""


def send(channel: grpc.Channel, attempt: Attempt) -> int:
    """Make a call, and return the number of its answers; fail unless it ends properly, or serves."""
    call, messages = attempt
    witness = () if _names_later_sequences(call, messages) else WITNESSES.get(call.name, ())
    has_all_answers = threading.Event()

    def sent() -> Iterator[bytes]:
        yield from messages
        yield from (message.SerializeToString() for message in witness)
        if witness:
            has_all_answers.wait(CALL_SECONDS)

    kind: Any = channel.stream_stream if call.is_stream else channel.unary_stream
    running = kind(call.path)(sent() if call.is_stream else messages[0], timeout=CALL_SECONDS)
    count = 0
    try:
        for content in running:
            count += 1
            if _is_last(call, content, count, messages):
                return count
    except grpc.RpcError:
        assert running.code() in _REFUSALS, (running.code(), running.details(), call.name, messages)
        check_sentence(running.details(), messages)
    finally:
        has_all_answers.set()
        running.cancel()
    return count


def _names_later_sequences(call: Call, messages: Sequence[bytes]) -> bool:
    """True if no sequence may begin with the witness's number any more, so that only the call's end is checked."""
    if call.name not in WITNESSES:
        return False
    kind = type(call.messages[0])
    for content in messages:
        with suppress(DecodeError):  # the service refuses it
            if any(part.sequence >= WITNESS for part in cast(Any, kind.FromString(content)).parts):
                return True
    return False


def _is_last(call: Call, content: bytes, count: int, messages: Sequence[bytes]) -> bool:
    """True when enough was answered to see that the call is served. Checks how sequences end."""
    if call.name == "WatchStats":
        return True  # the next answer is as long in coming as the caller wants
    if call.name not in WITNESSES:
        return count == _ENOUGH
    is_last = False
    for part in cast(Any, call.answer.FromString(content)).parts:
        if part.HasField("ending"):
            assert part.ending.code in _ENDINGS, (part, messages)
            if part.ending.code:
                check_sentence(part.ending.message, messages)
            if part.sequence == WITNESS:
                assert part.ending.code == 0, (part, messages)
                is_last = True
    return is_last


def check_sentence(sentence: str, why: object) -> None:
    """Fail, and say why, unless it is one sentence for a caller."""
    assert sentence, why
    assert "\n" not in sentence, (sentence, why)
    assert not any(word in sentence for word in _WORDS_OF_OURS), (sentence, why)


def valid(call: Call) -> Attempt:
    """The call as it should be."""
    return call, [message.SerializeToString() for message in call.messages]

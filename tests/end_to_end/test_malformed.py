"""Malformed messages: every service answers or refuses them in time, and continues to serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2
from tests.end_to_end.processes import Process, address_of, coordinator, model_service
from tests.malformed import contents, streams
from tests.paths import DEMO_DRAFT, DEMO_TARGET

pytestmark = pytest.mark.slow

EXAMPLES, SOAK_EXAMPLES = 200, 20_000
CALL_SECONDS = 20.0
"""Bound on a hang. A step on a busy machine takes a tenth of a second."""
ENOUGH = 4
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
WORDS_OF_OURS = ("Traceback", "Error:", "site-packages", ".py", "0x")
"""Words that must not appear in errors for clients."""

GENERATE = generation_pb2.GenerateRequest(text="def f(", max_tokens=3, temperature=0.5, seed=1, stop=["\n\n"])
SAMPLING = types_pb2.SamplingParams(
    temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.0
)
DELTA = types_pb2.Delta(base_length=0, token_ids=[1, 2, 3])
NEXT_DELTA = types_pb2.Delta(base_length=3, token_ids=[4, 5])
PROPOSE = (
    draft_pb2.ProposeRequest(
        open=draft_pb2.ProposeOpen(
            request_id="r",
            sampling=SAMPLING,
            max_length=40,
            row_kind=types_pb2.ROW_KIND_SUPPORT,
            draft_top_k=8,
        )
    ),
    draft_pb2.ProposeRequest(step=draft_pb2.ProposeStep(delta=DELTA, token_count=2)),
    draft_pb2.ProposeRequest(step=draft_pb2.ProposeStep(delta=NEXT_DELTA, token_count=3)),
    draft_pb2.ProposeRequest(finish=draft_pb2.ProposeFinish()),
)
VERIFY = (
    target_pb2.VerifyRequest(
        open=target_pb2.VerifyOpen(request_id="r", sampling=SAMPLING, max_length=40, prompt_token_count=3)
    ),
    target_pb2.VerifyRequest(
        step=target_pb2.VerifyStep(delta=DELTA, row_kind=types_pb2.ROW_KIND_TOKEN, row_count=1)
    ),
    target_pb2.VerifyRequest(
        step=target_pb2.VerifyStep(
            delta=NEXT_DELTA,
            row_kind=types_pb2.ROW_KIND_SUPPORT,
            row_count=3,
            supports=[target_pb2.Support(token_ids=[4, 9]), target_pb2.Support(token_ids=[5, 8])],
            with_statistics=True,
        )
    ),
    target_pb2.VerifyRequest(finish=target_pb2.VerifyFinish()),
)


def many(messages: Sequence[Message]) -> list[types_pb2.SequencePart]:
    """The same statuses, for a sequence on a shared stream."""
    return [types_pb2.SequencePart(sequence=1, message=each.SerializeToString()) for each in messages]


DROP = types_pb2.SequencePart(sequence=2, end=types_pb2.SequenceEnd())
"""A message for an unknown sequence; after mutation it may name a known one."""
PROPOSE_MANY = (
    *(draft_pb2.ProposeManyRequest(parts=[part]) for part in many(PROPOSE)),
    draft_pb2.ProposeManyRequest(parts=[DROP]),
)
VERIFY_MANY = (
    *(target_pb2.VerifyManyRequest(parts=[part]) for part in many(VERIFY)),
    target_pb2.VerifyManyRequest(parts=[DROP]),
)


@dataclass(frozen=True)
class Served:
    """A service's process, and its main method called with raw bytes."""

    process: Process
    call: Callable[[list[bytes]], Any]
    good: list[bytes]

    def answers(self, messages: list[bytes]) -> int:
        """Send the messages, and return the number of answers; fail unless the call ends properly."""
        call = self.call(messages)
        count = 0
        try:
            for _ in call:
                count += 1
                if count == ENOUGH:  # it is valid after all, and may run for long
                    call.cancel()
                    return count
        except grpc.RpcError:
            assert call.code() in REFUSALS, (call.code(), call.details(), self.process.story[-4000:])
            assert not any(word in call.details() for word in WORDS_OF_OURS), call.details()
        assert not self.process.has_ended, self.process.story
        return count


@pytest.fixture(scope="module")
def target() -> Iterator[Process]:
    with model_service("target_service", DEMO_TARGET) as process:
        yield process


@pytest.fixture(scope="module")
def draft() -> Iterator[Process]:
    with model_service("draft_service", DEMO_DRAFT) as process:
        yield process


@pytest.fixture(scope="module")
def front(target: Process, draft: Process) -> Iterator[Process]:
    with coordinator(address_of(target), address_of(draft), "--log-level", "warning") as process:
        yield process


def served(process: Process, path: str, good: tuple[Message, ...]) -> Iterator[Served]:
    with grpc.insecure_channel(address_of(process)) as channel:
        if len(good) == 1:
            method: Any = channel.unary_stream(path)
            yield Served(process, lambda messages: method(messages[0], timeout=CALL_SECONDS), _contents(good))
        else:
            stream: Any = channel.stream_stream(path)
            yield Served(
                process, lambda messages: stream(iter(messages), timeout=CALL_SECONDS), _contents(good)
            )
    assert "unexpected error" not in process.stderr, process.stderr[-4000:]


def _contents(messages: tuple[Message, ...]) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


@pytest.fixture(scope="module")
def generation(front: Process) -> Iterator[Served]:
    yield from served(front, "/tandem.v1.GenerationService/Generate", (GENERATE,))


@pytest.fixture(scope="module")
def proposing(draft: Process) -> Iterator[Served]:
    yield from served(draft, "/tandem.v1.DraftService/Propose", PROPOSE)


@pytest.fixture(scope="module")
def verifying(target: Process) -> Iterator[Served]:
    yield from served(target, "/tandem.v1.TargetService/Verify", VERIFY)


@pytest.fixture(scope="module")
def proposing_many(draft: Process) -> Iterator[Served]:
    yield from served(draft, "/tandem.v1.DraftService/ProposeMany", PROPOSE_MANY)


@pytest.fixture(scope="module")
def verifying_many(target: Process) -> Iterator[Served]:
    yield from served(target, "/tandem.v1.TargetService/VerifyMany", VERIFY_MANY)


def check(service: Served, sent: st.SearchStrategy[list[bytes]], examples: int) -> None:
    """Send this many malformed streams, and then a valid one."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]

    # No shrinking: an example that hangs would hang again in each smaller form.
    @settings(
        phases=[Phase.generate],
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=health,
    )
    @given(sent)
    def send(messages: list[bytes]) -> None:
        service.answers(messages)

    send()
    assert service.answers(service.good) > 0


COUNTS = pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(SOAK_EXAMPLES, marks=pytest.mark.soak)])


@COUNTS
def test_the_coordinator_survives_malformed_messages(generation: Served, examples: int) -> None:
    check(generation, contents(GENERATE).map(lambda content: [content]), examples)


@COUNTS
def test_the_draft_service_survives_malformed_messages(proposing: Served, examples: int) -> None:
    check(proposing, streams(PROPOSE), examples)


@COUNTS
def test_the_target_service_survives_malformed_messages(verifying: Served, examples: int) -> None:
    check(verifying, streams(VERIFY), examples)


@COUNTS
def test_the_draft_service_survives_malformed_messages_on_a_shared_stream(
    proposing_many: Served, examples: int
) -> None:
    check(proposing_many, streams(PROPOSE_MANY), examples)


@COUNTS
def test_the_target_service_survives_malformed_messages_on_a_shared_stream(
    verifying_many: Served, examples: int
) -> None:
    check(verifying_many, streams(VERIFY_MANY), examples)


def test_messages_above_the_limit_are_refused(
    generation: Served, proposing: Served, verifying: Served, verifying_many: Served
) -> None:
    for service in (generation, proposing, verifying, verifying_many):
        assert service.answers([b"\0" * (5 << 20)]) == 0
        assert service.answers(service.good) > 0

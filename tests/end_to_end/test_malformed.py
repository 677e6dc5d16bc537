"""Malformed messages: every service answers or refuses them in time, and continues to serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings

from tests.end_to_end.processes import NO_KERNELS, Process, address_of, coordinator, model_service
from tests.malformed import CALLS, contents, streams
from tests.paths import DEMO_DRAFT, DEMO_TARGET

pytestmark = pytest.mark.slow
EXAMPLES, SOAK_EXAMPLES = 100, 20_000
CALL_SECONDS = 20.0
"""Bound on a hang. A step on a busy machine takes a tenth of a second."""
ENOUGH = 4
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
WORDS_OF_OURS = ("Traceback", "Error:", "site-packages", ".py", "0x")
"""Words that must not appear in errors for clients."""


class Served:
    """A service's process, and its main method called with raw bytes."""

    def __init__(self, process: Process, channel: grpc.Channel, path: str, good: Sequence[Message]) -> None:
        self.process = process
        self.good = [message.SerializeToString() for message in good]
        self._is_unary = len(good) == 1
        self._method: Any = channel.unary_stream(path) if self._is_unary else channel.stream_stream(path)

    def answers(self, messages: list[bytes]) -> int:
        """Send the messages, and return the number of answers; fail unless the call ends properly."""
        call = self._method(messages[0] if self._is_unary else iter(messages), timeout=CALL_SECONDS)
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
def services() -> Iterator[dict[str, Served]]:
    with ExitStack() as stack:
        enter = stack.enter_context
        processes = {
            "target": enter(model_service("tandem_target", DEMO_TARGET, *NO_KERNELS)),
            "draft": enter(model_service("tandem_draft", DEMO_DRAFT, *NO_KERNELS)),
        }
        addresses = address_of(processes["target"]), address_of(processes["draft"])
        processes["coordinator"] = enter(coordinator(*addresses, "--log-level", "warning"))
        yield {
            name: Served(process, enter(grpc.insecure_channel(address_of(process))), *CALLS[name])
            for name, process in processes.items()
        }
        for process in processes.values():
            assert "unexpected error" not in process.stderr, process.stderr[-4000:]


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(SOAK_EXAMPLES, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", CALLS)
def test_a_service_survives_malformed_messages(services: dict[str, Served], name: str, examples: int) -> None:
    """And then answers a valid call."""
    service, (_, good) = services[name], CALLS[name]
    sent = streams(good) if len(good) > 1 else contents(good[0]).map(lambda content: [content])
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]

    # No shrinking: an example that hangs would hang again in each smaller form.
    @settings(
        phases=[Phase.generate],
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=health,
    )
    @given(sent)
    def send(messages: list[bytes]) -> None:
        service.answers(messages)

    send()
    assert service.answers(service.good) > 0


def test_messages_above_the_limit_are_refused(services: dict[str, Served]) -> None:
    for service in services.values():
        assert service.answers([b"\0" * (5 << 20)]) == 0
        assert service.answers(service.good) > 0

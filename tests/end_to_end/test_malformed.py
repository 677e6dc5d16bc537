"""Malformed messages: every service answers or refuses them in time, and continues to serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import grpc
import pytest

from tests.end_to_end.processes import NO_KERNELS, Process, address_of, coordinator, model_service
from tests.malformed import attempts, drawn, main_call, send, valid
from tests.paths import DEMO_DRAFT, DEMO_TARGET

pytestmark = pytest.mark.slow
EXAMPLES = 100
SOAK_EXAMPLES = 20_000


class Served(NamedTuple):
    """A service's process, and a channel to it."""

    process: Process
    channel: grpc.Channel


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Served]]:
    with ExitStack() as stack:
        enter = stack.enter_context
        processes = {
            "target": enter(model_service("tandem_target", DEMO_TARGET, *NO_KERNELS)),
            "draft": enter(model_service("tandem_draft", DEMO_DRAFT, *NO_KERNELS)),
        }
        addresses = address_of(processes["target"]), address_of(processes["draft"])
        processes["generation"] = enter(coordinator(*addresses, "--log-level", "warning"))
        yield {
            name: Served(process, enter(grpc.insecure_channel(address_of(process))))
            for name, process in processes.items()
        }
        for process in processes.values():
            assert "unexpected error" not in process.stderr, process.stderr[-4000:]


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(SOAK_EXAMPLES, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["target", "draft", "generation"])
def test_a_service_survives_malformed_messages(services: dict[str, Served], name: str, examples: int) -> None:
    """And then answers a valid call."""
    service = services[name]
    for attempt in drawn(attempts(name), examples):
        send(service.channel, attempt)
        assert not service.process.has_ended, service.process.story
    assert send(service.channel, valid(main_call(name))) > 0


def test_messages_above_the_limit_are_refused(services: dict[str, Served]) -> None:
    for name, service in services.items():
        call = main_call(name)
        assert send(service.channel, (call, [b"\0" * (5 << 20)])) == 0
        assert send(service.channel, valid(call)) > 0

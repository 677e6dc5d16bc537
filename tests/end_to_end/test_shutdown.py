"""Starts that fail, with one sentence and not with code 0, and shutdowns: running calls finish within bounds, new ones
are refused, and no process is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tandem.clients.client import Client, Completed
from tandem.errors import ServiceUnavailableError
from tandem.model.types import GenerationRequest
from tandem.rpc.channels import open_channel
from tandem.v1.target_pb2 import TargetServiceGetModelInfoRequest
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tests.end_to_end.processes import (
    NO_KERNELS,
    START_SECONDS,
    Process,
    address_of,
    coordinator,
    descendants,
    is_alive,
    model_service,
    running,
    service,
    until,
)
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service import clients

pytestmark = pytest.mark.slow

TOKENS = 250
"""A request of at least a third of a second, which still runs at the signal and ends within the drain."""
REQUEST = GenerationRequest("def f(", max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
END_SECONDS = 45.0
"""Bound on an exit after a drain: the drain timeout, 30 s unless set, and the time to exit on a busy machine."""
QUICK_SECONDS = 25.0
"""Bound on an exit without running calls."""


@pytest.mark.parametrize(
    ("code", "options", "sentence"),
    [
        (1, ("--start-timeout-seconds", "0.5"), "target service at 127.0.0.1:1 was not ready within 0.5 s"),
        (2, ("--method", "ngram"), "speculative_method is ngram; it needs a draft service"),
    ],
)
def test_a_start_that_fails_is_explained_in_one_sentence(
    target_address: str, code: int, options: tuple[str, ...], sentence: str
) -> None:
    address = "127.0.0.1:1" if code == 1 else target_address
    with service(
        "tandem_coordinator", "--target-address", address, *options, "--log-level", "error"
    ) as process:
        assert process.wait() == code
        (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


async def generation(client: Client) -> asyncio.Task[Completed]:
    begun = asyncio.Event()
    task = asyncio.create_task(clients.complete(client, REQUEST, begun))
    await asyncio.wait_for(begun.wait(), START_SECONDS)
    assert not task.done()
    return task


async def test_running_generations_finish_and_new_ones_are_refused() -> None:
    """All services get the signal at once, as at the shutdown of a machine."""
    with (
        model_service("tandem_target", DEMO_TARGET, *NO_KERNELS) as target,
        model_service("tandem_draft", DEMO_DRAFT, *NO_KERNELS) as draft,
        coordinator(address_of(target), address_of(draft)) as front,
    ):
        async with Client(address_of(front)) as client, open_channel(address_of(target)) as channel:
            target_stub = TargetServiceStub(channel)
            await target_stub.GetModelInfo(TargetServiceGetModelInfoRequest())
            task = await generation(client)
            for process in (target, draft, front):
                process.signal(signal.SIGTERM)
            await clients.until(lambda: "draining" in front.stderr + target.stderr, QUICK_SECONDS)
            async with Client(address_of(front)) as newcomer:
                for each in (client, newcomer):
                    with pytest.raises(ServiceUnavailableError):
                        await clients.complete(each, REQUEST)
            completed = await task
        assert len(completed.token_ids) == TOKENS
        assert [process.wait(END_SECONDS) for process in (front, draft, target)] == [0, 0, 0]
        assert "Traceback" not in front.stderr + draft.stderr + target.stderr


async def test_a_drain_is_bounded(target_address: str, draft_address: str) -> None:
    with coordinator(target_address, draft_address, "--drain-timeout-seconds", "0.1") as front:
        async with Client(address_of(front)) as client:
            task = await generation(client)
            front.signal(signal.SIGTERM)
            with pytest.raises(ServiceUnavailableError):
                await task
        assert front.wait(QUICK_SECONDS) == 0
        assert "Traceback" not in front.stderr


def test_a_signal_during_model_loading_ends_the_process() -> None:
    command = (sys.executable, "-P", "-m", "tandem_target", "--port", "0", "--model", str(DEMO_TARGET))
    with running(*command) as process:
        process.line("listening on ")
        process.signal(signal.SIGTERM)
        assert process.wait(QUICK_SECONDS) == 0
        assert "ready on" not in process.stdout
        assert "Traceback" not in process.stderr


@pytest.mark.parametrize("wrapper", ["", "nohup"])
def test_hangups_are_heeded_except_under_nohup(wrapper: str) -> None:
    """Holds too if the tests themselves run under nohup, whose ignored SIGHUP children would inherit."""
    options = ("--port", "0", "--target-address", "127.0.0.1:1")
    command = (wrapper, sys.executable, "-P", "-m", "tandem_coordinator", *options)
    with running(*command) if wrapper else service("tandem_coordinator", *options) as process:
        process.line("listening on ")
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert bool(ignored >> (signal.SIGHUP - 1) & 1) is bool(wrapper)
        process.signal(signal.SIGTERM if wrapper else signal.SIGHUP)
        assert process.wait(QUICK_SECONDS) == 0


@contextmanager
def stand_ins(behaviour: str = "") -> Iterator[tuple[Process, list[int]]]:
    """`tandem up` over services of that behaviour (see `stand_in.py`), and its children."""
    with service("stand_in", "up", "--model", "demo", environment={"STAND_IN": behaviour}) as process:
        if behaviour == "starts":
            until(lambda: len(descendants(process.pid)) >= 2, START_SECONDS, lambda: process.story)
        else:
            process.line("tandem up: ready on ")
        yield process, descendants(process.pid)


def test_a_second_ctrl_c_ends_a_cluster_at_once() -> None:
    with stand_ins("stays") as (process, children):
        command_lines = [Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8") for child in children]
        (folder,) = {
            Path(found[1]).parent for each in command_lines if (found := re.search("unix:([^\0]*)", each))
        }
        assert folder.is_dir()

        def impatient() -> bool:
            """Repeat the signal until the process ends; two at once may count as one."""
            with suppress(ProcessLookupError):  # it has just ended
                process.signal(signal.SIGINT)
            return process.has_ended

        until(impatient, QUICK_SECONDS)
        assert process.wait(QUICK_SECONDS) == 128 + signal.SIGINT
        until(lambda: not any(map(is_alive, children)), QUICK_SECONDS)
        assert "Traceback" not in process.stderr
        assert not folder.exists()


@pytest.mark.parametrize("behaviour", ["", "starts"])
def test_ctrl_c_ends_a_cluster(behaviour: str) -> None:
    with stand_ins(behaviour) as (process, children):
        # A terminal sends the signal to the whole foreground group.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(QUICK_SECONDS) == 0
        assert not any(map(is_alive, children))
        assert process.stderr == ""


@pytest.mark.parametrize(("number", "name"), [(0, "target"), (1, "draft"), (2, "coordinator")])
def test_a_child_that_dies_ends_the_cluster(number: int, name: str) -> None:
    with stand_ins() as (process, children):
        os.kill(sorted(children)[number], signal.SIGKILL)
        assert process.wait(QUICK_SECONDS) == 1
        assert not any(map(is_alive, children))
        assert process.stderr == (
            f"error: the {name} service was ended by SIGKILL; the other services were stopped\n"
        )

"""Effects of a failing vLLM on the service: a typed error, an end, or a step that is known to hang; a full cache."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.engine.interface import RowRequest
from tandem.engine_vllm import worker as worker_module
from tandem.engine_vllm.step import Step
from tandem.engine_vllm.worker import RowWorker
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.model.types import Delta, RowKind, TokenRow, VerifyStep
from tandem.serving.server import serve
from tandem_coordinator.transport.target_client import TargetClient
from tandem_target.service import TargetService
from tandem_target.settings import TargetSettings
from tests.end_to_end.processes import descendants, free_port, is_alive
from tests.unit.engine.tiny_models import save_checkpoint
from tests.vllm.families import FAMILIES
from tests.vllm.models import GREEDY, Twin, prompts, text_of, together, twin_of

pytestmark = pytest.mark.timeout(600)

_ASK = RowRequest(VerifyStep(Delta(0, [5, 6, 7]), RowKind.TOKEN, 1), GREEDY)


async def _asked(twin: Twin) -> int:
    sequence = await twin.engine.open(8)
    try:
        (row,) = (await twin.engine.run(sequence, _ASK)).rows
    finally:
        twin.engine.release(sequence)
    assert isinstance(row, TokenRow)
    return row.token_id


_STEP = RowWorker.tandem_step


def _steps(patch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Call this before each of the worker's steps. vLLM has mixed the methods into a class that looks them up here."""

    def step(self: RowWorker, of: Step) -> None:
        before()
        _STEP(self, of)

    patch.setattr(worker_module.RowWorker, "tandem_step", step)


def _full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _health(channel: grpc.aio.Channel) -> AsyncIterator[str]:
    """The service's readiness, now and whenever it changes."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

    async def states() -> AsyncIterator[str]:
        async for each in watch:
            yield health_pb2.HealthCheckResponse.ServingStatus.Name(each.status)

    return states()


async def test_a_service_that_hangs_or_runs_out_of_memory_is_not_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang that ends lets it serve again; memory that stays full ends it."""
    save_checkpoint(tmp_path, FAMILIES["llama"]())
    settings = TargetSettings(
        model=tmp_path, engine="vllm", dtype="float32", threads=1, port=free_port(), max_length=64,
        max_sequences=4, enforce_eager=True, step_timeout_seconds=0.2,
    )  # fmt: skip
    served = asyncio.create_task(serve(settings, TargetService(settings)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.port}") as channel:
        await channel.channel_ready()
        health = _health(channel)
        client = TargetClient(channel)
        while await anext(health) != "SERVING":
            pass
        await client.probe()
        goes_on = threading.Event()
        _steps(monkeypatch, before=goes_on.wait)
        asked = asyncio.create_task(client.probe())
        assert await anext(health) == "NOT_SERVING"
        with pytest.raises(ServiceUnavailableError, match="stuck in a step"):
            await client.probe()
        goes_on.set()
        await asked
        assert await anext(health) == "SERVING"
        _steps(monkeypatch, before=_full)
        with pytest.raises(TandemError, match="step failed"):
            await client.probe()
        failures = 1
        while not served.done():
            with pytest.raises(TandemError):
                await client.probe()
            failures += 1
        assert await anext(health) == "NOT_SERVING"
        assert failures > 2, "one full step ended it"
    with pytest.raises(TandemError, match="the engine has failed"):
        await served


async def test_the_youngest_are_computed_again_where_the_cache_is_full(tmp_path: Path) -> None:
    """A block of 32 tokens takes 16 KiB, and a text up to four of them: there is room for three of sixteen."""
    async with twin_of(tmp_path, FAMILIES["llama"](), kv_cache_memory_bytes=13 << 14) as twin:
        texts = prompts(16)
        found = await together(*(text_of(twin.engine, prompt, 32) for prompt in texts))
        assert all(twin.is_greedy(prompt, text) for prompt, text in zip(texts, found, strict=True))
        assert twin.engine.usage.preemption_count > 0


def _workers(of: int) -> list[int]:
    return [each for each in descendants(of) if "VLLM::Worker" in Path(f"/proc/{each}/cmdline").read_text()]


async def test_two_workers_compute_one_model_and_the_engine_ends_with_either(tmp_path: Path) -> None:
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail() -> None:
        loop.call_soon_threadsafe(failed.set)

    async with twin_of(
        tmp_path, FAMILIES["llama"](num_key_value_heads=2), on_failure=fail, tensor_parallel_size=2
    ) as twin:
        texts = prompts(6)
        found = await together(*(text_of(twin.engine, prompt, 16) for prompt in texts))
        assert all(twin.is_greedy(prompt, text) for prompt, text in zip(texts, found, strict=True))
        again = zip(texts, found, strict=True)
        assert await together(*(text_of(twin.engine, *pair[:1], 16, pair[1]) for pair in again)) == found
        workers = _workers(os.getpid())
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        await failed.wait()
        with pytest.raises(TandemError):
            await _asked(twin)
    assert not any(map(is_alive, workers))


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_no_worker_outlives_its_service(tmp_path: Path, when: str) -> None:
    """However the service ends, and whatever the workers do at that time."""
    save_checkpoint(tmp_path, FAMILIES["llama"](num_key_value_heads=2))
    options = {"model": tmp_path, "engine": "vllm", "tensor-parallel-size": 2, "threads": 1, "port": 0}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tandem_target", *arguments, "--enforce-eager", "--host=127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        workers: list[int] = []
        said = ""
        while len(workers) < 2 or (when == "serving" and "vLLM has loaded" not in said):
            said = service.stderr.readline()
            assert said, "the service has ended"
            workers = _workers(service.pid)
        service.kill()
    while any(map(is_alive, workers)):
        time.sleep(0.01)

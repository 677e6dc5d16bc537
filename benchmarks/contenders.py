"""The ways of decoding that are compared, and the services behind them, each a process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.common import Contender, free_port, service
from benchmarks.load.clients import Connection, LoadRequest, http_connection, served_model
from benchmarks.load.figures import Served
from benchmarks.peers import Answer, Outcome, Workload, peer
from coordinator.cli.serve import BOUND_PACKAGE
from coordinator.cli.up import SHARES
from coordinator.stats.speculation import add
from tandem.client import Client
from tandem.config.names import BOUND_METHODS, MODEL_FREE_METHODS, OWN_METHODS, checkpoint_method
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.types import GenerationRequest, SpeculationStats

HEAD_METHODS = tuple(method for method in BOUND_METHODS if method not in OWN_METHODS)
"""Drafting methods whose heads have folders of their own."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Models and options that all contenders share."""

    target: Path
    draft: Path
    max_length: int
    """Maximum tokens of a sequence, prompt and completion together."""
    max_sequences: int
    num_speculative_tokens: int
    logs: Path
    """Folder for what contenders write to stderr."""
    dtype: str = "bfloat16"
    threads: int = 1
    device: str = "cpu"
    """Device of both models, unless the draft has one of its own."""
    draft_device: str = ""
    """Empty: the target's."""
    serving_engine: str = ""
    """Engine of Tandem's services; empty: their own choice."""
    tensor_parallel_size: int = 1
    """GPUs of the target."""
    vllm_python: Path | None = None
    vllm_eager: bool = False
    max_python: Path | None = None
    pace: str = ""
    """Minimum duration of steps; empty: none."""
    notes_steps: bool = False
    """True if paced services note their steps in `logs`."""
    rule: str = ""
    """rejection_sampling_strategy of Tandem's contenders; empty: the default."""
    delay_ms: float = 0.0
    """Delay between the coordinator and each service, one way."""
    head: Path | None = None
    """Folder of a drafting head for the target; None for those bundled with it."""

    def head_folder(self, method: str) -> Path | None:
        """The folder of the target's head for a drafting method; None if there is none."""
        folder = self.target.parent / method if self.head is None else self.head
        return folder if folder.is_dir() and checkpoint_method(folder) == method else None

    def as_json(self) -> dict[str, Any]:
        """The fields, with paths as text."""
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the services."""

    target: str
    draft: str
    coordinator: str
    ahead: str
    """Second coordinator of the same services, which drafts ahead; the first one's address where there is none."""


@asynccontextmanager
async def services(
    setup: Setup, *, prefix_caching: bool = False, with_ahead: bool = True
) -> AsyncIterator[Addresses]:
    """Run a draft service, a target service and two coordinators; without `with_ahead` only the first of these.

    Contenders that share a target would reuse each other's prefixes of the same prompts. So prefix caching is off,
    except where it is measured.
    """
    async with AsyncExitStack() as stack:
        # One after the other: two that load at once slow each other more than they gain.
        target, draft = [
            await _delayed(setup, await stack.enter_async_context(_model(setup, role, prefix_caching)), stack)
            for role in ("target", "draft")
        ]
        coordinators = [
            await stack.enter_async_context(coordinator_of(setup, target, draft, "--draft-ahead", option))
            for option in (("off", "auto") if with_ahead else ("off",))
        ]
        yield Addresses(target, draft, coordinators[0], coordinators[-1])


def coordinator_of(
    setup: Setup, target: str, draft: str | None, *options: str
) -> AbstractAsyncContextManager[str]:
    """A coordinator; without a draft's address it finds the one that the target hosts. The setup's rule wins."""
    return service(
        "coordinator",
        *("--target-address", target, *(() if draft is None else ("--draft-address", draft))),
        *("--num-speculative-tokens", str(setup.num_speculative_tokens)),
        *options,
        *(("--rejection-sampling-strategy", setup.rule) if setup.rule else ()),
    )


def _model(setup: Setup, role: str, prefix_caching: bool) -> AbstractAsyncContextManager[str]:
    """A draft or target service; its steps have a minimum duration where a pace is given."""
    folder = setup.target if role == "target" else setup.draft
    options = ("--model", str(folder), *_model_options(setup, role, prefix_caching))
    if setup.pace:
        steps = ("--steps", str(setup.logs / f"{role}.steps")) if setup.notes_steps else ()
        return service("benchmarks.pace", "--role", role, "--pace", setup.pace, *steps, *options)
    return service(f"{role}_service", *options)


def _model_options(setup: Setup, role: str, prefix_caching: bool = False) -> tuple[str, ...]:
    device = setup.draft_device if role == "draft" and setup.draft_device else setup.device
    is_shared = device != "cpu" and setup.draft_device in ("", setup.device)
    # vLLM's plug-in opens the next sequences before the last ones have ended.
    sequences = setup.max_sequences * (2 if role == "draft" else 1)
    return (
        *(() if prefix_caching else ("--no-enable-prefix-caching",)),
        *("--dtype", setup.dtype, "--threads", str(setup.threads), "--device", device),
        *("--max-length", str(setup.max_length), "--max-sequences", str(sequences)),
        *(("--device-memory-utilization", str(SHARES[role])) if is_shared else ()),
        *(("--engine", setup.serving_engine) if setup.serving_engine else ()),
        *(("--enforce-eager",) if setup.serving_engine == "vllm" and setup.vllm_eager else ()),
        *(_of_several_gpus(setup) if role == "target" else ()),
    )


def _of_several_gpus(setup: Setup) -> Iterator[str]:
    if setup.tensor_parallel_size > 1:
        yield from ("--tensor-parallel-size", str(setup.tensor_parallel_size))
    if setup.serving_engine == "vllm":
        yield from ("--num-speculative-tokens", str(setup.num_speculative_tokens))


async def _delayed(setup: Setup, address: str, stack: AsyncExitStack) -> str:
    """The address at which a service answers, later if a delay is asked for."""
    if not setup.delay_ms:
        return address
    words = ("--role", "delay", "--to", address, "--ms", str(setup.delay_ms))
    return await stack.enter_async_context(service("benchmarks.pace", *words))


class ThroughServices:
    """Tandem as users run it: this process is the client of a coordinator."""

    def __init__(
        self,
        client: Client,
        *,
        speculation: bool = True,
        tokens: int | None = None,
        is_seeded: bool = True,
        ignore_eos: bool = True,
    ) -> None:
        """
        Args:
            speculation: False for the target alone.
            tokens: num_speculative_tokens of the requests; None for the coordinator's.
            is_seeded: True if requests have seeds: the workload's and those that follow.
            ignore_eos: False for completions that may end by themselves.
        """
        self._client = client
        self._speculation = speculation
        self._tokens = tokens
        self._is_seeded = is_seeded
        self._ignore_eos = ignore_eos

    async def run(self, workload: Workload) -> Outcome:
        """Complete the prompts over one connection."""
        stats = SpeculationStats()
        started = time.perf_counter()

        async def one(number: int, prompt: tuple[int, ...]) -> Answer:
            answer = Answer()
            request = GenerationRequest(
                prompt,
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                seed=workload.seed + number if self._is_seeded else None,
                num_speculative_tokens=self._tokens,
                speculation=self._speculation,
                ignore_eos=self._ignore_eos,
            )
            async for chunk in self._client.generate(request):
                answer.add(time.perf_counter() - started, list(chunk.token_ids))
                if chunk.summary is not None:
                    add(stats, chunk.summary.speculation)
            return answer

        answers = await asyncio.gather(*map(one, count(), workload.prompts))
        counts = stats.rounds, stats.drafted, stats.accepted, stats.lead.rounds, stats.lead.wasted
        return Outcome(answers, time.perf_counter() - started, *counts)


Start = Callable[[Setup, Addresses], AbstractAsyncContextManager[Contender]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A contender that can be asked for."""

    title: str
    """Display name."""
    start: Start
    is_ours: bool = False
    """True if a failure ends the run; another engine's failure is part of the report."""
    largest_batch: int | None = None
    """Maximum requests at once; None for any number."""
    absent: Callable[[Setup], str] = lambda _: ""
    """Reason why it cannot run with a setup; empty when it can."""


@asynccontextmanager
async def through(coordinator: str, *, speculation: bool = True) -> AsyncIterator[Contender]:
    """The client of a coordinator that runs."""
    async with Client(coordinator) as client:
        yield ThroughServices(client, speculation=speculation)


def _by_head(method: str) -> Start:
    """A target of its own with a head beside it, and a coordinator."""

    @asynccontextmanager
    async def start(setup: Setup, _: Addresses) -> AsyncIterator[Contender]:
        async with AsyncExitStack() as stack:
            folders = ("--model", str(setup.target), "--draft-model", str(setup.head_folder(method)))
            hosted = service(BOUND_PACKAGE, *folders, *_model_options(setup, "target"))
            target = await _delayed(setup, await stack.enter_async_context(hosted), stack)
            # A head's default rule is lossy; the others' contenders leave the target's distribution as it is.
            lossless = ("--rejection-sampling-strategy", "residual")
            address = await stack.enter_async_context(coordinator_of(setup, target, None, *lossless))
            yield await stack.enter_async_context(through(address))

    return start


def _by_method(method: str) -> Start:
    """A draft service without a model, and a coordinator, before the target that all share."""

    @asynccontextmanager
    async def start(setup: Setup, addresses: Addresses) -> AsyncIterator[Contender]:
        async with AsyncExitStack() as stack:
            drafting = await stack.enter_async_context(service("draft_service", "--method", method))
            draft = await _delayed(setup, drafting, stack)
            address = await stack.enter_async_context(coordinator_of(setup, addresses.target, draft))
            yield await stack.enter_async_context(through(address))

    return start


def _no_head(method: str) -> Callable[[Setup], str]:
    def reason(setup: Setup) -> str:
        if setup.head_folder(method) is None:
            return f"name the folder of the target's {method} head with --head"
        return "--pace does not slow a head, which runs in the target's process" if setup.pace else ""

    return reason


def _no_vllm(setup: Setup) -> str:
    return "" if setup.vllm_python else "name a Python that has vLLM with --vllm-python"


def _no_max(setup: Setup) -> str:
    if setup.max_python is None:
        return "name a Python that has MAX with --max-python"
    if setup.device == "cpu" and setup.dtype != "float32":
        return f"MAX computes in float32 only on a CPU, and dtype is {setup.dtype}"
    return ""


def _peer(
    setup: Setup, python: Path | None, *module: str, **extra: Any
) -> AbstractAsyncContextManager[Contender]:
    """A process of its own, by this Python or another engine's."""
    name = "-".join([module[-1], *(word for word in extra.values() if isinstance(word, str) and word)])
    command = [str(python or sys.executable), *module]
    return peer(name, command, {**setup.as_json(), **extra}, setup.logs / f"{name}.log")


def _transformers(title: str, assistance: str) -> Kind:
    return Kind(
        title,
        lambda setup, _: _peer(setup, None, "benchmarks.peers", "transformers", assistance=assistance),
        largest_batch=1 if assistance else None,
    )


def _vllm(title: str, mode: str, ahead: str = "") -> Kind:
    """vLLM's offline engine; in mode tandem it drafts by the draft service that all share, so many outcomes ahead."""

    def start(setup: Setup, addresses: Addresses) -> AbstractAsyncContextManager[Contender]:
        plug_in = {"TANDEM_VLLM_DRAFT_ADDRESS": addresses.draft, "TANDEM_VLLM_DRAFT_AHEAD": ahead}
        extra = {"mode": mode, "ahead": ahead, "environment": plug_in if mode == "tandem" else {}}
        return _peer(setup, setup.vllm_python, "benchmarks.peers", "vllm", **extra)

    return Kind(title, start, absent=_no_vllm)


class _ThroughHttp:
    """Completes prompts over OpenAI's API. The server sends texts, so each chunk counts as a token of unknown id."""

    def __init__(self, origin: str, model: str) -> None:
        self._origin = origin
        self._model = model

    async def run(self, workload: Workload) -> Outcome:
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(http_connection(self._origin, self._model))
                for _ in workload.prompts
            ]
            started = time.perf_counter()

            async def one(connection: Connection, prompt: tuple[int, ...]) -> Answer:
                served, answer = Served(started), Answer()
                request = LoadRequest(prompt, workload.max_tokens, workload.temperature)
                await connection.complete(request, served)
                for moment in served.chunks:
                    answer.add(moment - started, [-1])
                return answer

            answers = await asyncio.gather(*map(one, connections, workload.prompts))
            return Outcome(answers, time.perf_counter() - started)


@asynccontextmanager
async def _max(setup: Setup, _: Addresses) -> AsyncIterator[Contender]:
    assert setup.max_python is not None
    port = free_port()
    words = [
        *("--model-path", setup.target, "--port", port),
        *("--devices", "cpu" if setup.device == "cpu" else "gpu"),
        *("--quantization-encoding", setup.dtype, "--max-length", setup.max_length),
        *("--max-batch-size", setup.max_sequences),
    ]
    command = [str(setup.max_python.with_name("max")), "serve", *map(str, words)]
    with (setup.logs / "max.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        origin, model = f"http://127.0.0.1:{port}", ""
        while not model:
            if server.returncode is not None:
                raise ServiceUnavailableError(f"max serve ended with exit code {server.returncode}")
            with suppress(TandemError):
                model = await served_model(origin)
            await asyncio.sleep(0.5)
        yield _ThroughHttp(origin, model)
    finally:
        if server.returncode is None:
            server.terminate()
            await server.wait()


CONTENDERS: dict[str, Kind] = {
    "target-alone": Kind(
        "Tandem, target alone", lambda _, at: through(at.coordinator, speculation=False), is_ours=True
    ),
    "speculative": Kind("Tandem, speculative", lambda _, at: through(at.coordinator), is_ours=True),
    "speculative-ahead": Kind("Tandem, drafting ahead", lambda _, at: through(at.ahead), is_ours=True),
    **{
        method: Kind(f"Tandem, {method}", _by_head(method), is_ours=True, absent=_no_head(method))
        for method in HEAD_METHODS
    },
    **{method: Kind(f"Tandem, {method}", _by_method(method), is_ours=True) for method in MODEL_FREE_METHODS},
    "one-process": Kind(
        "the same loop in one process",
        lambda setup, _: _peer(setup, None, "benchmarks.one_process"),
        is_ours=True,
    ),
    "transformers": _transformers("transformers generate", ""),
    "assisted": _transformers("transformers assisted, same K", "fixed"),
    "assisted-defaults": _transformers("transformers assisted, its defaults", "defaults"),
    "vllm": _vllm("vLLM", "alone"),
    "vllm-ngram": _vllm("vLLM, ngram", "ngram"),
    "vllm-draft": _vllm("vLLM, draft model", "draft_model"),
    "vllm-tandem": _vllm("vLLM, Tandem's drafts", "tandem", "off"),
    "vllm-tandem-ahead": _vllm("vLLM, Tandem's drafts, ahead", "tandem", "auto"),
    "max": Kind("MAX", _max, absent=_no_max),
}
"""By the name that `--contenders` takes."""

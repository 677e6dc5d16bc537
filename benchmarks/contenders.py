"""The ways of decoding that are compared, their options, and the services behind them, each a process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from benchmarks.open_pair import open_pair
from benchmarks.pace import Pace
from benchmarks.pairs import Pair
from benchmarks.peers import Answer, Contender, Outcome, Workload, peer
from tandem.clients.client import Client
from tandem.config.names import BOUND_METHODS, MODEL_FREE_METHODS, OWN_METHODS, checkpoint_method
from tandem.config.settings import FilledSettings
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.model.types import GenerationRequest, SpeculationStats
from tandem_coordinator.cli.up import SHARES
from tandem_coordinator.stats.speculation import add
from tandem_load.common import CACHE_FOLDER, Listed, Positive, free_port, service
from tandem_load.generator import Connection, Served, http_connection, served_model

HEAD_METHODS = tuple(method for method in BOUND_METHODS if method not in OWN_METHODS)
"""Drafting methods whose heads have folders of their own."""
PREFIX_TOKENS = 512
"""Of the prefix whose second reading is timed."""


def _known(word: str) -> str:
    name, *options = word.split() or [word]
    if name not in CONTENDERS:
        raise ValueError(f"there is no contender {name!r}; it must be one of {', '.join(CONTENDERS)}")
    if options and not CONTENDERS[name].is_ours:
        raise ValueError(f"{name} has no coordinator, which {' '.join(options)} would be for")
    return word


def _paced(text: str) -> str:
    if text:
        Pace.from_text(text)
    return text


class BenchSettings(FilledSettings):
    """Measure ways of decoding with the same weights and prompts, in turn, on this machine."""

    model_config = SettingsConfigDict(cli_shortcuts={"json-file": "json", "markdown-file": "markdown"})

    env_prefix: ClassVar = "TANDEM_BENCH_"

    pair: str = "demo"
    """demo, random (the demo target, and a draft of random weights), TARGET:DRAFT (folders or Hugging Face ids), or
    shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT, for instance shaped:200M:1:0.8: random weights with the shape of
    Llama 3.1, whose draft agrees that often."""
    contenders: Listed[Annotated[str, BeforeValidator(_known)]] = Field(
        default_factory=lambda: tuple(CONTENDERS)
    )
    """Ways of decoding to compare, without those of an engine whose Python is not given. One of Tandem's may have
    options of its coordinator behind its name, as one word: "speculative-ahead --target-lead 0"."""
    batch: Listed[Positive] = (1, 4, 16)
    """Requests at once."""
    temperature: Listed[Annotated[float, Field(ge=0)]] = (0.0, 1.0)
    """0 is greedy."""
    rounds: Positive = 5
    """Number of times that each contender completes each batch, in turn with the others."""
    max_tokens: int = Field(default=64, ge=2)
    """Tokens of each completion."""
    num_speculative_tokens: Positive = 4
    """Tokens proposed per verification."""
    rule: str = ""
    """rejection_sampling_strategy of Tandem's contenders. By default the coordinator's."""
    seeded: bool = True
    """Send a seed with each request to Tandem."""
    eos: bool = False
    """Let completions of Tandem's services end by themselves."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type that every contender computes in."""
    threads: Positive = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPU threads of each model; by default one for each core."""
    device: str = "cpu"
    """Device of the models: cpu, cuda or cuda:N."""
    draft_device: str = ""
    """Device of the draft service of Tandem's contenders. By default the target's."""
    engine: Literal["", "tandem", "vllm"] = ""
    """Engine of Tandem's services. By default their own choice."""
    tensor_parallel_size: Positive = 1
    """GPUs of the target, with the engine vllm and for vLLM itself."""
    pace: Annotated[str, BeforeValidator(_paced)] = ""
    """VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]: minimum duration of the steps of Tandem's and vLLM's contenders (they
    sleep), and a share more for each 8 tokens; for instance 6.5,1.2,0.1."""
    delay: float = Field(default=0.0, ge=0)
    """Milliseconds of delay between the coordinator and a service, one way."""
    fresh: bool = False
    """Start a new coordinator for each run, without a warm-up: it has learnt nothing yet."""
    prefix: bool = True
    """Measure the gain for a prompt whose first 512 tokens were served before."""
    phases: bool = True
    """Measure the phases of a round, and bytes on the wire."""
    steps: bool = False
    """Measure steps of the engine, beside torch's own and the time to read the weights once."""
    head: Annotated[Path | None, Field(exclude=True)] = None
    """Folder of a drafting head for the target, for the contenders that draft with one. By default the head bundled
    with it, a folder beside it with the method's name."""
    vllm_python: Annotated[Path | None, Field(exclude=True)] = None
    """A Python that has vLLM."""
    vllm_eager: bool = False
    """Run vLLM without torch.compile, also as an engine: it starts in seconds, and is slower."""
    max_python: Annotated[Path | None, Field(exclude=True)] = None
    """A Python that has MAX; on a CPU it computes in float32 only."""
    cache_folder: Annotated[Path, Field(exclude=True)] = CACHE_FOLDER
    """Folder of shaped pairs."""
    json_file: Annotated[Path | None, Field(exclude=True)] = None
    """Write everything that was measured to this file."""
    markdown_file: Annotated[Path | None, Field(exclude=True)] = None
    """Write the tables to this file."""
    note: str = ""
    """A sentence about the circumstances, for the report."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The part that all contenders share."""

    settings: BenchSettings
    pair: Pair
    logs: Path
    """Folder for what contenders write to stderr."""
    options: tuple[str, ...] = ()
    """Further options of the contender's coordinator."""
    target_address: str = ""
    """Addresses of the model services that contenders share; empty where none of them needs one."""
    draft_address: str = ""

    @property
    def max_length(self) -> int:
        settings = self.settings
        longest = max(PREFIX_TOKENS, *map(len, self.pair.prompts())) + settings.max_tokens
        # vLLM asks no proposer so near to the longest length
        return longest + 2 * settings.num_speculative_tokens

    @property
    def max_sequences(self) -> int:
        return max(*self.settings.batch, 2)

    def head_folder(self, method: str) -> Path | None:
        """The folder of the target's head for a drafting method; None if there is none."""
        folder = self.settings.head or self.pair.target.parent / method
        return folder if folder.is_dir() and checkpoint_method(folder) == method else None

    def as_json(self) -> dict[str, Any]:
        limits = {"max_length": self.max_length, "max_sequences": self.max_sequences}
        folders = {"target": str(self.pair.target), "draft": str(self.pair.draft)}
        return {**self.settings.model_dump(mode="json"), **folders, **limits, "options": self.options}


@contextmanager
def prepared(settings: BenchSettings) -> Iterator[Setup]:
    """Open the pair, or make it, and a folder for logs that goes afterwards."""
    with TemporaryDirectory(prefix="tandem-bench-") as logs:
        yield Setup(settings, open_pair(settings.pair, settings.cache_folder, settings.device), Path(logs))


@asynccontextmanager
async def models(setup: Setup, *, prefix_caching: bool = False) -> AsyncIterator[Setup]:
    """Run a target service and a draft service; the setup with their addresses.

    Contenders that share a target would reuse each other's prefixes of the same prompts. So prefix caching is off,
    except where it is measured.
    """
    async with AsyncExitStack() as stack:

        async def started(role: str) -> str:
            folder = setup.pair.target if role == "target" else setup.pair.draft
            pace = setup.settings.pace
            steps = ("--steps", str(setup.logs / f"{role}.steps"))
            package = (
                ("benchmarks.pace", "--role", role, "--pace", pace, *steps) if pace else (f"tandem_{role}",)
            )
            words = ("--model", str(folder), *_model_options(setup, role, prefix_caching))
            return await _running(setup, stack, service(*package, *words))

        # One after the other: two that load at once slow each other more than they gain.
        target = await started("target")
        yield replace(setup, target_address=target, draft_address=await started("draft"))


async def _running(setup: Setup, stack: AsyncExitStack, started: AbstractAsyncContextManager[str]) -> str:
    """The address of a service, behind the delay that is asked for."""
    address = await stack.enter_async_context(started)
    if delay := setup.settings.delay:
        words = ("--role", "delay", "--to", address, "--ms", str(delay))
        return await stack.enter_async_context(service("benchmarks.pace", *words))
    return address


def _model_options(setup: Setup, role: str, prefix_caching: bool = False) -> Iterator[str]:
    settings = setup.settings
    device = settings.draft_device if role == "draft" and settings.draft_device else settings.device
    # vLLM's plug-in opens the next sequences before the last ones have ended.
    sequences = setup.max_sequences * (2 if role == "draft" else 1)
    yield from ("--dtype", settings.dtype, "--threads", str(settings.threads), "--device", device)
    yield from ("--max-length", str(setup.max_length), "--max-sequences", str(sequences))
    if not prefix_caching:
        yield "--no-enable-prefix-caching"
    if device != "cpu" and settings.draft_device in ("", settings.device):
        yield from ("--device-memory-utilization", str(SHARES[role]))
    if settings.engine:
        yield from ("--engine", settings.engine)
    if settings.engine == "vllm":
        yield from ("--enforce-eager",) if settings.vllm_eager else ()
        if role == "target":
            yield from ("--num-speculative-tokens", str(settings.num_speculative_tokens))
    if role == "target" and settings.tensor_parallel_size > 1:
        yield from ("--tensor-parallel-size", str(settings.tensor_parallel_size))


def requests_of(workload: Workload, **changes: Any) -> list[GenerationRequest]:
    """The workload's requests to Tandem. Changes are fields that all of them have otherwise than it asks for."""
    common: dict[str, Any] = {"max_tokens": workload.max_tokens, "temperature": workload.temperature}
    common["ignore_eos"] = True
    return [
        GenerationRequest(**common | {"prompt": prompt, "seed": workload.seed + number} | changes)
        for number, prompt in enumerate(workload.prompts)
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """A contender that can be asked for."""

    title: str
    start: Callable[[Setup], AbstractAsyncContextManager[Contender]]
    is_ours: bool = False
    """True if a failure ends the run; another engine's failure is part of the report."""
    shares_models: bool = False
    """True if it uses the model services that contenders share."""
    has_target_service: bool = False
    """True if a target service of ours takes its steps, whose times are noted where they are paced."""
    largest_batch: int | None = None
    """Maximum requests at once; None for any number."""
    absent: Callable[[Setup], str] = lambda _: ""
    """Reason why it cannot run with a setup; empty when it can."""

    @property
    def has_shared_target(self) -> bool:
        return self.is_ours and self.shares_models


@asynccontextmanager
async def through(
    setup: Setup, target: str, draft: str, *options: str, **changes: Any
) -> AsyncIterator[Contender]:
    """Tandem as users run it: this process is the client of a coordinator over these services.

    Without a draft's address it finds the target's own. The setup's options win. Changes: see `requests_of`.
    """
    settings = setup.settings
    asked = {"ignore_eos": not settings.eos, **({} if settings.seeded else {"seed": None}), **changes}
    coordinator = service(
        "tandem_coordinator",
        *("--target-address", target, *(("--draft-address", draft) if draft else ())),
        *("--num-speculative-tokens", str(settings.num_speculative_tokens)),
        # All contenders sample alike, whatever the model's own defaults
        *("--generation-config", "vllm"),
        *options,
        *(("--rejection-sampling-strategy", settings.rule) if settings.rule else ()),
        *setup.options,
    )
    async with coordinator as address, Client(address) as client:

        async def run(workload: Workload) -> Outcome:
            stats = SpeculationStats()
            started = time.perf_counter()

            async def one(request: GenerationRequest) -> Answer:
                answer = Answer()
                async for chunk in client.generate(request):
                    answer.add(time.perf_counter() - started, list(chunk.token_ids))
                    if chunk.summary is not None:
                        add(stats, chunk.summary.speculation)
                return answer

            answers = await asyncio.gather(*map(one, requests_of(workload, **asked)))
            counts = stats.rounds, stats.drafted, stats.accepted, stats.lead.rounds, stats.lead.wasted
            return Outcome(answers, time.perf_counter() - started, *counts)

        yield run


def _ours(title: str, method: str = "", *, ahead: str = "off", speculation: bool = True) -> Kind:
    """A coordinator before the services that all share; with a drafting method, before a draft service of its own
    without a model, or a target of its own with a head beside it."""
    is_head = method in HEAD_METHODS

    @asynccontextmanager
    async def start(setup: Setup) -> AsyncIterator[Contender]:
        target = setup.target_address
        draft = setup.draft_address
        words: tuple[str, ...] = () if method else ("--draft-ahead", ahead)
        async with AsyncExitStack() as stack:
            if is_head:
                target = await _with_head(setup, stack, method)
                draft = ""
                # A head's default rule is lossy; the others' contenders leave the target's distribution as it is.
                words = ("--rejection-sampling-strategy", "residual")
            elif method:
                draft = await _running(setup, stack, service("tandem_draft", "--method", method))
            contender = through(setup, target, draft, *words, speculation=speculation)
            yield await stack.enter_async_context(contender)

    absent = partial(_no_head, method) if is_head else lambda _: ""
    return Kind(title, start, is_ours=True, shares_models=not is_head, has_target_service=True, absent=absent)


async def _with_head(setup: Setup, stack: AsyncExitStack, method: str) -> str:
    """The address of a target with a head of its own."""
    pace = setup.settings.pace
    steps = ("--steps", str(setup.logs / "target.steps"))
    package = ("benchmarks.pace", "--role", "target", "--pace", pace, *steps) if pace else ("tandem_target",)
    folders = ("--model", str(setup.pair.target), "--draft-model", str(setup.head_folder(method)))
    own = service(*package, *folders, *_model_options(setup, "target"))
    return await _running(setup, stack, own)


def _no_head(method: str, setup: Setup) -> str:
    if setup.head_folder(method) is None:
        return f"name the folder of the target's {method} head with --head"
    return ""


def _no_max(setup: Setup) -> str:
    settings = setup.settings
    if settings.max_python is None:
        return "name a Python that has MAX with --max-python"
    if settings.device == "cpu" and settings.dtype != "float32":
        return f"MAX computes in float32 only on a CPU, and dtype is {settings.dtype}"
    return ""


def _peer(
    setup: Setup, python: Path | None, *module: str, **extra: Any
) -> AbstractAsyncContextManager[Contender]:
    """A process of its own, by this Python or another engine's."""
    words = [word for word in extra.values() if isinstance(word, str) and word]
    name = "-".join([module[-1], *(Path(word).name for word in words)])
    command = [str(python or sys.executable), *module]
    return peer(name, command, {**setup.as_json(), **extra}, setup.logs / f"{name}.log")


def _one_process(method: str, setup: Setup) -> AbstractAsyncContextManager[Contender]:
    """The loop in a process of its own, with a head of the target's, or without one with the draft."""
    head = str(setup.head_folder(method)) if method else ""
    return _peer(setup, None, "benchmarks.one_process", own_head=head)


def _transformers(title: str, assistance: str) -> Kind:
    return Kind(
        title,
        lambda setup: _peer(setup, None, "benchmarks.peers", "transformers", assistance=assistance),
        largest_batch=1 if assistance else None,
    )


def _vllm(title: str, mode: str, ahead: str = "") -> Kind:
    """vLLM's offline engine; in mode tandem it drafts by the draft service that all share, so many outcomes ahead."""

    def start(setup: Setup) -> AbstractAsyncContextManager[Contender]:
        plug_in = {"TANDEM_VLLM_DRAFT_ADDRESS": setup.draft_address, "TANDEM_VLLM_DRAFT_AHEAD": ahead}
        head = str(setup.head_folder(mode) or "") if mode in HEAD_METHODS else ""
        own = plug_in if mode == "tandem" else {}
        extra = {"mode": mode, "ahead": ahead, "own_head": head, "environment": own}
        return _peer(setup, setup.settings.vllm_python, "benchmarks.peers", "vllm", **extra)

    def absent(setup: Setup) -> str:
        if not setup.settings.vllm_python:
            return "name a Python that has vLLM with --vllm-python"
        return _no_head(mode, setup) if mode in HEAD_METHODS else ""

    return Kind(title, start, shares_models=mode == "tandem", absent=absent)


def _through_http(complete: Connection) -> Contender:
    """Completes prompts over OpenAI's API. The server sends texts, so each chunk counts as a token of unknown id."""

    async def run(workload: Workload) -> Outcome:
        started = time.perf_counter()

        async def one(request: GenerationRequest) -> Answer:
            served = Served(started)
            await complete(request, served)
            return Answer([-1] * len(served.chunks), [(moment - started, 1) for moment in served.chunks])

        answers = await asyncio.gather(*map(one, requests_of(workload)))
        return Outcome(answers, time.perf_counter() - started)

    return run


@asynccontextmanager
async def _max(setup: Setup) -> AsyncIterator[Contender]:
    settings = setup.settings
    port = free_port()
    assert settings.max_python is not None
    words = [
        *("--model-path", setup.pair.target, "--port", port),
        *("--devices", "cpu" if settings.device == "cpu" else "gpu"),
        *("--quantization-encoding", settings.dtype, "--max-length", setup.max_length),
        *("--max-batch-size", setup.max_sequences),
    ]
    command = [str(settings.max_python.with_name("max")), "serve", *map(str, words)]
    with (setup.logs / "max.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        base = f"http://127.0.0.1:{port}/v1"
        model = ""
        while not model:
            if server.returncode is not None:
                raise ServiceUnavailableError(f"max serve ended with exit code {server.returncode}")
            with suppress(TandemError):
                model = await served_model(base)
            await asyncio.sleep(0.5)
        async with http_connection(base, model) as complete:
            yield _through_http(complete)
    finally:
        if server.returncode is None:
            server.terminate()
            await server.wait()


CONTENDERS: dict[str, Kind] = {
    "target-alone": _ours("Tandem, target alone", speculation=False),
    "speculative": _ours("Tandem, speculative"),
    "speculative-ahead": _ours("Tandem, drafting ahead", ahead="auto"),
    **{method: _ours(f"Tandem, {method}", method) for method in (*HEAD_METHODS, *MODEL_FREE_METHODS)},
    "one-process": Kind(
        "the same loop in one process",
        partial(_one_process, ""),
        is_ours=True,
    ),
    **{
        f"{method}-one-process": Kind(
            f"the same loop in one process, {method}",
            partial(_one_process, method),
            is_ours=True,
            absent=partial(_no_head, method),
        )
        for method in HEAD_METHODS
    },
    "transformers": _transformers("transformers generate", ""),
    "assisted": _transformers("transformers assisted, same K", "fixed"),
    "assisted-defaults": _transformers("transformers assisted, its defaults", "defaults"),
    "vllm": _vllm("vLLM", "alone"),
    "vllm-ngram": _vllm("vLLM, ngram", "ngram"),
    "vllm-draft": _vllm("vLLM, draft model", "draft_model"),
    "vllm-eagle3": _vllm("vLLM, EAGLE-3", "eagle3"),
    "vllm-tandem": _vllm("vLLM, Tandem's drafts", "tandem", "off"),
    "vllm-tandem-ahead": _vllm("vLLM, Tandem's drafts, ahead", "tandem", "auto"),
    "max": Kind("MAX", _max, absent=_no_max),
}
"""By the name that `--contenders` takes."""


def kind_of(word: str) -> Kind:
    """The contender that a word of `--contenders` asks for."""
    return CONTENDERS[word.split()[0]]


def title_of(word: str) -> str:
    """Its display name, with its own options."""
    return " ".join((kind_of(word).title, *word.split()[1:]))


def start(word: str, setup: Setup) -> AbstractAsyncContextManager[Contender]:
    """Start it. An error is a `TandemError`."""
    return kind_of(word).start(replace(setup, options=tuple(word.split()[1:])))

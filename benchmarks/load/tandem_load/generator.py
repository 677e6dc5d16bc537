"""`tandem bench --clients N`: a load on a coordinator, over gRPC.

    tandem bench --clients 64 --rate 20 --goodput ttft:500 itl:50
    tandem bench --clients 64 --address 127.0.0.1:50051 --json load.json

Without --address a coordinator runs before two scripted services, so that no model is measured. Requests
arrive as a Poisson process and have log-normal lengths; --seed decides both. Options are named as those of `vllm bench
serve`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx2
import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from pydantic import AfterValidator, BeforeValidator, Field, FilePath, TypeAdapter
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.table import Table

from tandem.clients.client import Client, Retries
from tandem.config.rule import Rule, Rules
from tandem.config.settings import FilledSettings, load_settings
from tandem.errors import TandemError
from tandem.model.types import GenerationRequest
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.telemetry.progress import Progress
from tandem_coordinator.cli.serve import SERVICES
from tandem_load.common import Listed, Positive, free_port, one_sentence, process
from tandem_load.http_server import errors_of, event_of, first_model, raise_for, words_of

# ---- arrivals, lengths and figures, named as by `vllm bench serve`


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of token counts, cut at both ends."""

    median: float
    sigma: float
    """Standard deviation of the logarithm; 0: every length is the median."""
    minimum: int = 4
    maximum: int = 1024

    @classmethod
    def parse(cls, text: str) -> Lengths:
        try:
            median, *rest = map(float, text.split(":"))
            sigma, maximum = (*rest, *(0.0, 1024.0)[len(rest) :])
        except ValueError:
            raise ValueError("it must be MEDIAN, MEDIAN:SIGMA or MEDIAN:SIGMA:MAXIMUM") from None
        if not (median >= 1 and sigma >= 0 and maximum >= median) or not math.isfinite(median + sigma):
            raise ValueError("MEDIAN must be at least 1, SIGMA at least 0, MAXIMUM at least MEDIAN")
        return cls(median, sigma, min(4, int(median)), int(maximum))

    def drawn(self, count: int, random: np.random.Generator) -> list[int]:
        lengths = self.median * np.exp(self.sigma * random.standard_normal(count))
        return [int(each) for each in np.clip(np.rint(lengths), self.minimum, self.maximum)]

    def __str__(self) -> str:
        return f"{self.median:g}:{self.sigma:g}:{self.maximum}"


SHAREGPT_PROMPTS = Lengths(110.0, 1.15)
SHAREGPT_OUTPUTS = Lengths(110.0, 1.1)
"""Means of about 200 tokens with a long tail, as the chats of ShareGPT have after the filter of `vllm bench serve` (4
to 1,024 tokens)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent."""

    seconds: float
    """After the start."""
    prompt_tokens: int
    output_tokens: int


def arrivals(
    count: int,
    rate: float,
    seed: int,
    prompts: Lengths = SHAREGPT_PROMPTS,
    outputs: Lengths = SHAREGPT_OUTPUTS,
) -> list[Arrival]:
    """Requests in the order of their arrival: a Poisson process, whose gaps are exponential. At an infinite rate
    (requests a second) all arrive at the start."""
    # Each has random numbers of its own, so that a change of one leaves the others as they are.
    of_gaps, of_prompts, of_outputs = np.random.default_rng(seed).spawn(3)
    gaps = np.zeros(count) if math.isinf(rate) else of_gaps.exponential(1.0 / rate, count)
    # The first arrives at the start, as the gaps lie between requests.
    times = [0.0, *map(float, np.cumsum(gaps))][:count]
    lengths = prompts.drawn(count, of_prompts), outputs.drawn(count, of_outputs)
    return [Arrival(*each) for each in zip(times, *lengths, strict=True)]


LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; time per output token after it; between two chunks; from arrival to the end."""


@dataclass(slots=True)
class Served:
    """A request as its client saw it, in seconds of one clock."""

    arrived: float
    """When it was to be sent."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""
    ended: float = 0.0
    error: str = ""
    """Kind of the error that ended it; empty when it did not fail."""
    reason: str = ""

    def latencies(self) -> dict[str, list[float]]:
        """Seconds by name of `LATENCIES`, of a request with a chunk: one of each, but as many `itl` as there are gaps,
        and no `tpot` of a single token."""
        ttft = self.chunks[0] - self.arrived
        e2el = self.ended - self.arrived
        tpot = [(e2el - ttft) / (self.output_tokens - 1)] if self.output_tokens > 1 else []
        itl = [after - before for before, after in pairwise(self.chunks)]
        return {"ttft": [ttft], "tpot": tpot, "itl": itl, "e2el": [e2el]}


def bound_of(text: str) -> tuple[str, float]:
    """A latency and its bound in seconds, from NAME:MILLISECONDS as `vllm bench serve --goodput` takes it."""
    name, _, number = text.partition(":")
    try:
        milliseconds = float(number)
    except ValueError:
        milliseconds = math.nan
    if name not in LATENCIES or not milliseconds >= 0:
        raise ValueError(f"it must be NAME:MILLISECONDS, NAME one of {', '.join(LATENCIES)}")
    return name, milliseconds / 1000.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a load."""

    completed: int
    failed: int
    errors: Mapping[str, int]
    reasons: Mapping[str, str]
    """The sentence of the first error of each kind."""
    seconds: float
    """From the first arrival to the last end."""
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    goodput: float | None
    """Requests a second within the bounds; None without bounds."""
    latencies: Mapping[str, Mapping[str, float]]
    """The mean and percentiles (p50, p99) of each in milliseconds; without a latency that no request has."""


def figures(all_served: Sequence[Served], bounds: Mapping[str, float], percents: Sequence[float]) -> Figures:
    """The figures of requests that were served. For goodput a request has to keep all bounds, in seconds by latency;
    of its waits between chunks, the longest counts."""

    def spread(latencies: Sequence[float]) -> dict[str, float]:
        milliseconds = 1000.0 * np.asarray(latencies)
        found = zip(percents, np.percentile(milliseconds, percents), strict=True)
        return {
            "mean": float(milliseconds.mean()),
            **{f"p{percent:g}": float(value) for percent, value in found},
        }

    well = [served for served in all_served if not served.error and served.chunks]
    seconds = max(served.ended for served in all_served) - min(served.arrived for served in all_served)
    own = [served.latencies() for served in well]
    good = [all(max(each[name], default=0.0) <= bound for name, bound in bounds.items()) for each in own]
    values = {name: [seconds for each in own for seconds in each[name]] for name in LATENCIES}
    failures = [served for served in all_served if served.error]
    tokens = sum(served.output_tokens for served in well)
    return Figures(
        completed=len(well),
        failed=len(all_served) - len(well),
        errors=Counter(served.error for served in failures),
        reasons={served.error: served.reason for served in reversed(failures)},
        seconds=seconds,
        prompt_tokens=sum(served.prompt_tokens for served in well),
        output_tokens=tokens,
        requests_per_second=len(well) / seconds,
        output_tokens_per_second=tokens / seconds,
        goodput=sum(good) / seconds if bounds else None,
        latencies={name: spread(found) for name, found in values.items() if found},
    )


BETWEEN = "between"
"""Place of the wait between acceptance and the next question: text, chunks, the controller."""

Counts = Mapping[str, Mapping[float, float]]
"""By place, cumulative counts of waits by upper bound in seconds."""


def waits_of(page: str) -> Counts:
    """The waits in a page of metrics, those of all models together; other places than `BETWEEN` only where they are
    measured."""
    found: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            is_wait = name == "tandem_round_phase_seconds_bucket" and labels["phase"] == "wait"
            if is_wait or name == "tandem_round_wait_seconds_bucket":
                counts = found.setdefault(labels.get("place", BETWEEN), {})
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
    return found


def quantiles(before: Counts, after: Counts) -> dict[str, dict[str, float]]:
    """Median and p99 of the waits between two readings, in milliseconds by place; without places where none waited."""
    found = {}
    for place, counts in after.items():
        earlier = before.get(place, {})
        buckets = [(bound, counts[bound] - earlier.get(bound, 0.0)) for bound in sorted(counts)]
        if buckets[-1][1] > 0:
            shares = {"p50": 0.5, "p99": 0.99}
            found[place] = {name: 1000.0 * histogram_quantile(buckets, each) for name, each in shares.items()}
    return found


def histogram_quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile from upper bounds and cumulative counts, in proportion inside its bucket, as Prometheus computes it:
    the largest finite bound if it lies beyond; 0 of no values."""
    bounds, counts = zip(*buckets, strict=True)
    ends = [0.0, *bounds[:-1], bounds[-2]]
    return float(np.interp(share * counts[-1], [0.0, *counts], ends)) if counts[-1] else 0.0


# ---- clients: Tandem's over gRPC, or OpenAI's completions over HTTP, streamed


Connection = Callable[[GenerationRequest, Served], Awaitable[None]]
"""A client's connection, which has at most one request at once: reads the completion of token ids to its end, and notes
when its chunks come and how many tokens it has, or raises a `TandemError`."""
Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""Makes a client's connection."""


@asynccontextmanager
async def grpc_connection(address: str, credentials: Credentials = PLAIN) -> AsyncIterator[Connection]:
    """Connect to a coordinator at host:port."""
    # An answer that comes at the second attempt would hide the refusal of the first.
    async with Client(address, credentials, retries=Retries(attempts=1)) as client:

        async def complete(request: GenerationRequest, served: Served) -> None:
            async for chunk in client.generate(request):
                if chunk.token_ids:
                    served.chunks.append(time.perf_counter())
                    served.output_tokens += len(chunk.token_ids)

        yield complete


def _client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=10.0), trust_env=False)


async def served_model(base: str) -> str:
    """Name of the first model that a server lists."""
    async with _client() as client:
        return await first_model(client, base)


@asynccontextmanager
async def http_connection(base: str, model: str) -> AsyncIterator[Connection]:
    """Connect to an OpenAI-compatible server. One that reports no usage is counted a token for each chunk."""
    url = f"{base}/completions"
    async with _client() as client:

        async def complete(request: GenerationRequest, served: Served) -> None:
            asked = ("prompt", "max_tokens", "temperature", "ignore_eos")
            body: dict[str, Any] = {name: getattr(request, name) for name in asked}
            body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
            usage: int | None = None
            with errors_of(url):
                async with client.stream("POST", url, json=body) as response:
                    if not response.is_success:
                        await response.aread()
                    raise_for(response, url)
                    async for line in response.aiter_lines():
                        event = event_of(line)
                        if "error" in event:
                            raise TandemError(f"{url} ended a completion: {words_of(event)}")
                        if any(choice.get("text") for choice in event.get("choices") or ()):
                            served.chunks.append(time.perf_counter())
                        usage = (event.get("usage") or {}).get("completion_tokens", usage)
            served.output_tokens = len(served.chunks) if usage is None else usage

        yield complete


# ---- the load

_FIRST_ID, _IDS = 300, 1000
"""Prompts consist of these ids: lower ones are special tokens and single bytes."""
_PLACES = {
    "event_loop": "an answer, to be read",
    "answer": "a round, to go on with its answer",
    BETWEEN: "a round, from acceptance to its question",
    "question": "a question, to be written",
}
"""The places where a round waits in the coordinator, in its order."""


def _checked(text: str) -> str:
    bound_of(text)
    return text


def _one_coordinator(options: LoadSettings) -> Iterator[str]:
    if options.over == "http" and options.address:
        yield "--over http is about a coordinator that is started; for a server that runs there is guidellm"


class LoadSettings(FilledSettings):
    """Send a load to a coordinator. Without --address one runs before two scripted services, so that no model is
    measured; options from --rule on are for these. Requests arrive as a Poisson process and have log-normal lengths;
    --seed decides both. Names are those of `vllm bench serve`."""

    model_config = SettingsConfigDict(cli_shortcuts={"json-file": "json"})

    env_prefix: ClassVar = "TANDEM_LOAD_"

    own_rules: ClassVar[Rules] = (Rule("server", "A load has one coordinator.", _one_coordinator),)

    clients: Positive = 64
    """Connections, each with one request at once."""
    rate: float = Field(default=math.inf, gt=0)
    """Requests a second; inf: as many as clients take."""
    requests: Positive | None = None
    """By default four for each client."""
    seed: int = 0
    """Decides arrivals and lengths."""
    goodput: Listed[Annotated[str, AfterValidator(_checked)]] = ()
    """NAME:MS: bounds of ttft, tpot, itl or e2el."""
    percentiles: Listed[Annotated[float, Field(ge=0, le=100)]] = (50.0, 90.0, 99.0)
    """Percentiles of latencies."""
    prompt_tokens: Annotated[Lengths, BeforeValidator(Lengths.parse)] = SHAREGPT_PROMPTS
    """MEDIAN[:SIGMA[:MAXIMUM]]; by default as ShareGPT's chats."""
    output_tokens: Annotated[Lengths, BeforeValidator(Lengths.parse)] = SHAREGPT_OUTPUTS
    """Likewise."""
    temperature: float | None = Field(default=None, ge=0)
    """By default that of the rule, and 0 for a coordinator that runs."""
    json_file: Annotated[Path | None, Field(exclude=True)] = None
    """Write all figures there."""
    address: str = ""
    """HOST:PORT of a coordinator that runs. By default one is started."""
    token_file: Annotated[FilePath | None, Field(exclude=True)] = None
    """File with the token for it."""
    rule: Literal["greedy", "strict", "residual", "block"] = "greedy"
    """Acceptance rule above temperature 0."""
    over: Literal["grpc", "http"] = "grpc"
    """Protocol of the clients."""
    measure_waits: bool = False
    """Measure where rounds wait in the coordinator."""
    stream_interval: Positive = 1
    """Tokens of a chunk."""
    num_speculative_tokens: Positive = 4
    """Tokens proposed per verification."""
    acceptance: float = Field(default=0.72, ge=0, le=1)
    """Share of positions where the scripted draft is right."""
    verify_ms: float = Field(default=5.0, ge=0)
    """Duration of a step of the scripted target."""
    draft_ms: float = Field(default=1.0, ge=0)
    """Duration of a scripted proposal."""


@dataclass(frozen=True, slots=True)
class Used:
    """Resources that one process used, its children included."""

    processor_milliseconds_per_token: float
    mebibytes: list[float]
    """Resident memory of the process and of each of its children at the end."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load, as `--json` writes it."""

    options: LoadSettings
    """Without what names a file of this machine."""
    figures: Figures
    used: Mapping[str, Used]
    """By process; of a coordinator elsewhere, only the clients'."""
    round_waits: Mapping[str, Mapping[str, float]]
    """p50 and p99 in milliseconds of the times that a round waits in the coordinator, by place; empty where its metrics
    are not read."""


def table(report: LoadReport) -> Table:
    """The report as a table of two columns."""

    def described(values: Mapping[str, float], digits: int) -> str:
        return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())

    found = report.figures
    shown = Table("figure", "value")
    add = shown.add_row
    add("requests completed / failed", f"{found.completed} / {found.failed}")
    for name, count in found.errors.items():
        add(f"failed with {name}", f"{count}: {found.reasons[name]}")
    add("duration (s)", f"{found.seconds:.1f}")
    add("tokens of prompts / completions", f"{found.prompt_tokens} / {found.output_tokens}")
    add("requests per second", f"{found.requests_per_second:.2f}")
    if found.goodput is not None:
        bounds = " ".join(report.options.goodput)
        add(f"goodput, requests per second ({bounds})", f"{found.goodput:.2f}")
    add("completion tokens per second", f"{found.output_tokens_per_second:.0f}")
    for name, spread in found.latencies.items():
        add(f"{name.upper()} (ms)", described(spread, 1))
    for name, used in report.used.items():
        sizes = " + ".join(f"{size:.0f}" for size in used.mebibytes)
        add(f"{name}: ms of a core per token; MiB", f"{used.processor_milliseconds_per_token:.3f}; {sizes}")
    for place, words in _PLACES.items():
        if place in report.round_waits:
            add(f"waits (ms): {words}", described(report.round_waits[place], 2))
    return shown


def run(arguments: Sequence[str], program: str = "tandem bench") -> None:
    """Send a load, print the table, write the file. Ends the process with one sentence when it cannot."""
    with one_sentence():
        options = load_settings(LoadSettings, arguments, program)
        with Progress(program, sys.stderr) as progress:
            report = uvloop.run(_measure(options, progress))
    Console(highlight=False).print(table(report))
    if options.json_file is not None:
        options.json_file.write_bytes(TypeAdapter(LoadReport).dump_json(report, indent=2) + b"\n")
    if not report.figures.completed:
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The server under load."""

    connect: Connect
    pids: Mapping[str, int]
    """Processes that are measured by name; clients: this one."""
    metrics_url: str = ""
    """Empty where no metrics are read."""

    def used(self) -> dict[str, float]:
        """Processor seconds of each process so far. The clients' has started the others, which count by themselves."""
        return {
            name: sum(os.times()[:2]) if name == "clients" else sum(spent for spent, _ in resources(pid))
            for name, pid in self.pids.items()
        }

    def waits(self) -> Counts:
        if not self.metrics_url:
            return {}
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            return waits_of(response.read().decode())


async def _measure(options: LoadSettings, progress: Progress) -> LoadReport:
    progress.show("connecting" if options.address else "starting the services")
    async with _loaded(options) as server:
        temperature = options.temperature
        if temperature is None:
            temperature = 0.0 if len(server.pids) == 1 or options.rule == "greedy" else 1.0

        async def sent(count: int, rate: float, seed: int) -> list[Served]:
            wanted = arrivals(count, rate, seed, options.prompt_tokens, options.output_tokens)
            is_paced = not math.isinf(rate)
            answered = 0

            def count_answer() -> None:
                nonlocal answered
                answered += 1
                progress.show(f"{answered:,} of {count:,} requests answered", answered / count)

            return await send(
                server.connect,
                wanted,
                options.clients,
                temperature,
                is_paced=is_paced,
                on_answer=count_answer,
            )

        # To warm up
        await sent(8, math.inf, options.seed + 1)
        before = server.used()
        waits = server.waits()
        served = await sent(options.requests or 4 * options.clients, options.rate, options.seed)
        found = figures(served, dict(map(bound_of, options.goodput)), options.percentiles)
        used = {
            name: Used(
                1000.0 * (seconds - before[name]) / max(found.output_tokens, 1),
                [size for _, size in resources(server.pids[name])][: 1 if name == "clients" else None],
            )
            for name, seconds in server.used().items()
        }
        return LoadReport(options, found, used, quantiles(waits, server.waits()))


@asynccontextmanager
async def _loaded(options: LoadSettings) -> AsyncIterator[Loaded]:
    """The server that the options name, or a coordinator before two scripted services."""
    clients = {"clients": os.getpid()}
    if options.address:
        credentials = Credentials(token_file=options.token_file)
        yield Loaded(partial(grpc_connection, options.address, credentials), clients)
        return
    async with AsyncExitStack() as stack:
        (target, target_pid), (draft, draft_pid) = [
            await stack.enter_async_context(
                process(
                    f"{__package__}.fakes",
                    *("--role", role, "--step-ms", str(step), "--acceptance", str(options.acceptance)),
                )
            )
            for role, step in (("target", options.verify_ms), ("draft", options.draft_ms))
        ]
        metrics_port = free_port()
        http_port = free_port()
        # As many requests as the clients may send; by default 256 of them run.
        most = max(options.clients, 256)
        address, pid = await stack.enter_async_context(
            process(
                SERVICES["coordinator"],
                *("--target-address", target, "--draft-address", draft),
                *("--num-speculative-tokens", str(options.num_speculative_tokens)),
                *("--speculation-policy", "fixed", "--draft-ahead", "off"),
                *(() if options.rule == "greedy" else ("--rejection-sampling-strategy", options.rule)),
                *("--stream-interval", str(options.stream_interval)),
                *("--prometheus-port", str(metrics_port), "--max-concurrent-requests", str(most)),
                *(("--http-port", str(http_port)) if options.over == "http" else ()),
                *(("--measure-waits",) if options.measure_waits else ()),
            )
        )
        connect: Connect = partial(grpc_connection, address)
        if options.over == "http":
            base = f"http://127.0.0.1:{http_port}/v1"
            connect = partial(http_connection, base, await served_model(base))
        pids = {"coordinator": pid, "target": target_pid, "draft": draft_pid, **clients}
        yield Loaded(connect, pids, f"http://127.0.0.1:{metrics_port}/metrics")


async def send(
    connect: Connect,
    arrivals: Sequence[Arrival],
    clients: int,
    temperature: float,
    *,
    is_paced: bool,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Send all requests, each at its arrival or when a client is free, and read the answers to their ends. If they are
    paced, latencies begin at the arrival, else when a request is sent. `on_answer` is called at each end."""
    began = time.perf_counter()
    places: asyncio.Queue[Connection] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        for _ in range(clients):
            places.put_nowait(await stack.enter_async_context(connect()))

        async def serve(number: int, arrival: Arrival) -> Served:
            await asyncio.sleep(max(0.0, began + arrival.seconds - time.perf_counter()))
            complete = await places.get()
            try:
                served = Served(
                    began + arrival.seconds if is_paced else time.perf_counter(), arrival.prompt_tokens
                )
                # Prompts differ in their first token, so that no replica finds one of them in its cache.
                prompt = tuple(_FIRST_ID + (number + place) % _IDS for place in range(arrival.prompt_tokens))
                wanted = GenerationRequest(
                    prompt, max_tokens=arrival.output_tokens, temperature=temperature, ignore_eos=True
                )
                try:
                    await complete(wanted, served)
                except TandemError as error:
                    served.error, served.reason = type(error).__name__, str(error)
                served.ended = time.perf_counter()
                on_answer()
                return served
            finally:
                places.put_nowait(complete)

        return list(await asyncio.gather(*(serve(*each) for each in enumerate(arrivals))))


# ---- what processes take of the machine


def resources(pid: int) -> list[tuple[float, float]]:
    """Processor seconds so far, and resident MiB, of a process, its children, their children and so on; none where
    there is no /proc."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # The fields after its name (proc(5))
            text = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2]
            stats[int(path.parent.name)] = text.split()
    found = [pid]
    for each in found:
        found += [child for child, fields in stats.items() if int(fields[1]) == each]
    tick = os.sysconf("SC_CLK_TCK")
    page = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    alive = [stats[each] for each in found if each in stats]
    return [((int(each[11]) + int(each[12])) / tick, page * int(each[21])) for each in alive]

"""`python -m benchmarks.studies.telemetry`: the cost of traces and metrics, in tokens per second and per round."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.common import service
from benchmarks.prompts import held_out_prompts
from coordinator.decoding.completion import Completion, Limits
from coordinator.decoding.detokenization import Detokenizer, StopStrings
from coordinator.decoding.rounds import RoundRecorder
from coordinator.speculation.round_timings import RoundTimings
from coordinator.telemetry.observed import ObservedRequests
from coordinator.telemetry.observer import EventValue, RequestObserver
from tandem.client import Client
from tandem.types import Acceptance, GenerationRequest, NextToken, Proposal, Verification

_METHODS = (
    "opentelemetry.proto.collector.trace.v1.TraceService",
    "opentelemetry.proto.collector.metrics.v1.MetricsService",
)


def serve_sink(port: int) -> None:
    """A collector that takes everything and keeps nothing, until the process is ended."""
    server = grpc.server(ThreadPoolExecutor(2))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        lambda _request, _context: b""
    )
    for name in _METHODS:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    sys.stdout.write(f"ready on {address}\n")
    sys.stdout.flush()
    server.wait_for_termination()


MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "telemetry.md"
AT_ONCE = (1, 8)
NUM_SPECULATIVE_TOKENS = 4
ROUNDS = 20_000

_WAYS = ("none", "metrics", "all traced", "all traced, a span for each round")


async def main(repeats: int, prompt_count: int, max_tokens: int) -> str:
    """Measure both; the page of results."""
    costs = await round_costs()
    async with AsyncExitStack() as stack:
        sink = f"http://{await stack.enter_async_context(service('benchmarks.studies.telemetry', '--sink'))}"
        options = {
            "none": [],
            "metrics": ["--prometheus-port", "0"],
            "all traced": ["--prometheus-port", "0", "--otlp-endpoint", sink],
            "all traced, a span for each round": ["--prometheus-port", "0", "--otlp-endpoint", sink],
        }
        clients: dict[str, Client] = {}
        for way in _WAYS:
            rounds = ["--trace-rounds", "1"] if way == _WAYS[-1] else []
            address = await stack.enter_async_context(_cluster(options[way], rounds))
            clients[way] = await stack.enter_async_context(Client(address))
        speeds = {
            count: await _speeds(clients, count, repeats, prompt_count, max_tokens) for count in AT_ONCE
        }
    return _page(costs, speeds, repeats, max_tokens)


@asynccontextmanager
async def _cluster(options: Sequence[str], more: Sequence[str]) -> AsyncIterator[str]:
    """The demo pair behind a coordinator: its address."""
    threads = ("--threads", "1")
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(
            service("target_service", "--model", str(MODELS / "target"), *threads, *options)
        )
        draft = await stack.enter_async_context(
            service("draft_service", "--model", str(MODELS / "draft"), *threads, *options)
        )
        addresses = ("--target-address", target, "--draft-address", draft)
        yield await stack.enter_async_context(service("coordinator", *addresses, *options, *more))


async def _speeds(
    clients: dict[str, Client], at_once: int, repeats: int, prompt_count: int, max_tokens: int
) -> dict[str, list[float]]:
    """Tokens per second of each way, taken in turn, so that a machine that slows down slows all."""
    prompts = [prompt.text for prompt in held_out_prompts(prompt_count)]
    speeds: dict[str, list[float]] = {way: [] for way in clients}
    for repeat in range(repeats + 1):
        for way, client in clients.items():
            began = time.perf_counter()
            places = asyncio.Semaphore(at_once)
            tokens = sum(
                await asyncio.gather(*(_complete(client, prompt, max_tokens, places) for prompt in prompts))
            )
            if repeat:  # the first warms up
                speeds[way].append(tokens / (time.perf_counter() - began))
    return speeds


async def _complete(client: Client, prompt: str, max_tokens: int, places: asyncio.Semaphore) -> int:
    request = GenerationRequest(
        prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        ignore_eos=True,
    )
    async with places:
        return sum([len(chunk.token_ids) async for chunk in client.generate(request)])


# ---- the cost of a round


class _Nowhere(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class _Instant:
    """A draft and a target that answer at once."""

    draft_address: str | None = "draft:1"
    target_address: str | None = "target:1"
    completion_tokens = 0

    async def propose(self, completion: Completion) -> Proposal:
        return Proposal(1, (1, 2, 3, 4))

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        return Verification(1, ())

    def accept(self, proposal: Proposal, verification: Verification) -> Acceptance:
        return Acceptance(2, 7, NextToken.RECOVERED)


async def round_costs() -> dict[str, float]:
    """CPU seconds that watching adds to a round, by how it is watched: the best of five."""
    plain = min([await _rounds_seconds(RequestObserver) for _ in range(5)])
    costs = {}
    for name, sampler, trace_rounds in (
        ("metrics", None, 0.0),
        ("traced, not sampled", ALWAYS_OFF, 0.0),
        ("traced, sampled", ALWAYS_ON, 0.0),
        ("traced, a span for each round", ALWAYS_ON, 1.0),
    ):
        requests = ObservedRequests(CollectorRegistry(), _tracer(sampler), trace_rounds)
        requests.serve("model", NUM_SPECULATIVE_TOKENS)

        def begin(requests: ObservedRequests = requests) -> RequestObserver:
            return requests.begin("id")

        costs[name] = min([await _rounds_seconds(begin) for _ in range(5)]) - plain
    return costs


def _tracer(sampler: Sampler | None) -> Tracer | None:
    if sampler is None:
        return None
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    return provider.get_tracer("benchmark")


async def _rounds_seconds(begin: Callable[[], RequestObserver]) -> float:
    """CPU seconds of a round that is nothing but being watched. A request has 500, as long ones have."""
    per_request = 500
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    instant = _Instant()
    seconds = 0.0
    for _ in range(ROUNDS // per_request):
        completion = Completion(
            (1,), Limits(8192, 8192), Detokenizer(tokenizer), StopStrings(()), request_id="id", seed=0
        )
        observer = begin()
        details: dict[str, EventValue] = {
            "model": "model",
            "rule": "strict",
            "num_speculative_tokens": 4,
            "prompt_tokens": 1,
        }
        observer.planned(completion, details | {"max_tokens": 8192, "temperature": 0.0, "seed": 0})
        recorder = RoundRecorder(instant, instant, instant.accept, RoundTimings(None), instant)
        began = time.thread_time()
        for _ in range(per_request):
            proposal = await recorder.propose(completion)
            verification = await recorder.verify(completion, proposal)
            acceptance = recorder.accept(proposal, verification)
            observer.round_ended(recorder.result(completion.extend(proposal, acceptance)))
        seconds += time.thread_time() - began
        observer.finished(None)
    return seconds / ROUNDS


# ---- the page


def _page(
    costs: dict[str, float], speeds: dict[int, dict[str, list[float]]], repeats: int, max_tokens: int
) -> str:
    lines = [
        "# What telemetry costs",
        "",
        "    python -m benchmarks.studies.telemetry --write",
        "",
        f"Tokens per second of the demo pair on CPU, {NUM_SPECULATIVE_TOKENS} speculative tokens, temperature 0, "
        f"{max_tokens} tokens each: median of {repeats}",
        "runs taken in turn, and the median ratio to the run without telemetry beside it (lowest to highest).",
        "",
        "| telemetry | " + " | ".join(f"{count} at once | ratio" for count in speeds) + " |",
        "|---|" + "---:|---:|" * len(speeds),
    ]
    for way in _WAYS:
        cells = []
        for by_way in speeds.values():
            ratios = sorted(a / b for a, b in zip(by_way[way], by_way["none"], strict=True))
            cells.append(f"{statistics.median(by_way[way]):.1f}")
            cells.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "What watching adds to a round in the coordinator, draft and target answering at once (best of five times "
        f"{ROUNDS} rounds):",
        "",
        "| watched | CPU microseconds a round |",
        "|---|---:|",
        *(f"| {name} | {seconds * 1e6:.1f} |" for name, seconds in costs.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each way")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each run")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--rounds-only", action="store_true", help="only the cost of a round")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--sink", action="store_true", help="be the collector of the study")
    parser.add_argument("--port", type=int, default=0, help="of the collector")
    parser.add_argument("--log-level", help="taken, as services are started with one")
    arguments = parser.parse_args()
    if arguments.sink:
        serve_sink(arguments.port)
        sys.exit()
    if arguments.rounds_only:
        for name, seconds in asyncio.run(round_costs()).items():
            Console().print(f"{name}: {seconds * 1e6:.1f} us a round")
        sys.exit()
    page = asyncio.run(main(arguments.repeats, arguments.prompts, arguments.max_tokens))
    Console(markup=False, highlight=False).print(page, soft_wrap=True)
    if arguments.write:
        RESULTS.write_text(page, encoding="utf-8")

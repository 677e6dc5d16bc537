"""`python -m benchmarks.studies.servers --vllm-python PYTHON`: Tandem over HTTP beside each mode of vLLM's server.

The same clients send the same load to one server after the other, in turn. A server that is not loaded is stopped by
a signal, since vLLM's processes poll while they wait for work. Servers start one at a time, because vLLM compiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import CACHE_FOLDER, rotated
from benchmarks.load.clients import http_connection, served_model
from benchmarks.load.figures import Figures, Goodput, Lengths, arrivals, figures
from benchmarks.load.generator import checked, free_port, send, tree
from benchmarks.pairs import Pair, open_pair
from tandem.errors import ServiceUnavailableError, TandemError

OURS = {"Tandem, target alone": False, "Tandem": True}
"""By name, whether the server has a draft."""
MODES: dict[str, dict[str, object]] = {
    "vLLM": {},
    "vLLM, ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "vLLM, draft_model": {"method": "draft_model"},
}
"""By name, vLLM's speculative config without models and K."""
_KV_CACHE_GIBIBYTES = 1
_ASK_SECONDS = 0.5
_STOP_SECONDS = 30.0
_RESUME_SECONDS = 0.5
"""After a server goes on: its timers that were due while it was stopped run before it is measured."""
_WARM_UP_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server starts."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def launch_of(name: str, options: argparse.Namespace, pair: Pair, port: int) -> Launch:
    """The command of a server, without prefix caching: each round sends the same prompts.

    Args:
        name: One of `OURS` or `MODES`, with @THREADS after it where the threads are not those of the options.
        options: Of the command line.
        pair: Target and draft.
        port: Port to listen on for HTTP.
    """
    kind, _, number = name.partition("@")
    threads = int(number) if number else options.threads
    length, count = str(options.max_length), options.tokens
    if kind in OURS:
        draft = str(pair.draft) if OURS[kind] else "none"
        command = [
            *(sys.executable, "-P", "-m", "coordinator.cli", "up", "--port", "0", "--http-port", str(port)),
            *(
                "--target",
                str(pair.target),
                "--draft",
                draft,
                "--dtype",
                options.dtype,
                "--max-length",
                length,
            ),
            *(("--num-speculative-tokens", str(count)) if OURS[kind] else ()),
            *(() if threads is None else ("--threads", str(threads))),
        ]
        return Launch(
            command, {f"TANDEM_{role}_ENABLE_PREFIX_CACHING": "false" for role in ("TARGET", "DRAFT")}
        )
    command = [
        *(str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
        *("--port", str(port), "--model", str(pair.target), "--dtype", options.dtype),
        *("--max-model-len", length, "--max-num-seqs", str(options.clients), "--no-enable-prefix-caching"),
    ]
    if config := MODES[kind]:
        model = {"model": str(pair.draft)} if kind == "vLLM, draft_model" else {}
        command += ["--speculative-config", json.dumps({**config, **model, "num_speculative_tokens": count})]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIBIBYTES)}
    if threads is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    return Launch(command, environment)


@dataclass(slots=True)
class Server:
    """A server that runs."""

    name: str
    origin: str
    pid: int | None = None
    """Process whose tree serves; None: it was started elsewhere."""
    found: list[Figures] = field(default_factory=list)
    """One for each load that counts."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes that still runs."""
        if self.pid is not None:
            _signal_all(tree(self.pid), number)

    @property
    def speed(self) -> float:
        """Median of the tokens per second."""
        return statistics.median(one.output_tokens_per_second for one in self.found)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown; then the servers that did not start, with the reason."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    absent: list[str] = []
    async with AsyncExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(TemporaryDirectory(prefix="tandem-servers-")))
        servers = []
        for name in options.servers:
            try:
                servers.append(await stack.enter_async_context(started(name, options, pair, logs)))
            except TandemError as error:
                absent.append(f"\n{name}: {error}")
                continue
            sys.stderr.write(f"{name} is ready\n")
            servers[-1].signal(signal.SIGSTOP)
        await measured(options, servers)
        sys.stdout.write("\n".join([*table(servers), *absent]) + "\n")


@asynccontextmanager
async def started(name: str, options: argparse.Namespace, pair: Pair, logs: Path) -> AsyncIterator[Server]:
    """Start a server, and wait until it lists its model.

    Raises:
        ServiceUnavailableError: it ended before it was ready, or was not ready in time.
    """
    port = free_port()
    launch = launch_of(name, options, pair, port)
    log = logs / f"{name.replace(' ', '_').replace(',', '')}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *launch.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **launch.environment},
        )
    server = Server(name, f"http://127.0.0.1:{port}", process.pid)
    try:
        await _wait_until_ready(server, process, log, options.ready_seconds)
        yield server
    finally:
        server.signal(signal.SIGCONT)
        left = tree(process.pid)
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        _signal_all(left, signal.SIGKILL)
        await process.wait()


async def _wait_until_ready(
    server: Server, process: asyncio.subprocess.Process, log: Path, seconds: float
) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.returncode is not None:
            raise ServiceUnavailableError(f"ended with exit code {process.returncode}: {_reason(log)}")
        try:
            await served_model(server.origin)
        except TandemError:
            await asyncio.sleep(_ASK_SECONDS)
        else:
            return
    raise ServiceUnavailableError(f"not ready within {seconds:g} s: {_reason(log)}")


def _reason(log: Path) -> str:
    """The last line of a log that names an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it wrote nothing"])[-1]


async def measured(options: argparse.Namespace, servers: Sequence[Server]) -> None:
    """Load the servers in turn; the first round warms up and does not count."""
    wanted = arrivals(options.requests, math.inf, options.seed, options.prompt_tokens, options.output_tokens)
    for number in range(-1, options.rounds):
        for server in rotated(servers, number):
            server.signal(signal.SIGCONT)
            await asyncio.sleep(_RESUME_SECONDS)
            connect = partial(http_connection, server.origin, await served_model(server.origin))
            sent = partial(
                send, connect, clients=options.clients, temperature=options.temperature, is_paced=False
            )
            await sent(wanted[:_WARM_UP_REQUESTS])
            found = figures(await sent(wanted), Goodput({}), [50.0, 99.0])
            server.signal(signal.SIGSTOP)
            if number >= 0:
                server.found.append(found)
                sys.stderr.write(f"{server.name}: {found.output_tokens_per_second:.0f} tokens/s\n")


def table(servers: Sequence[Server]) -> list[str]:
    """The figures in Markdown. Ratios are medians of pairs of one round."""
    modes = [server for server in servers if server.name.startswith("vLLM") and server.found]
    best = max(modes, key=lambda server: server.speed, default=None)
    lines = [
        "| server | tokens/s of each round | median | by vLLM's best mode | TTFT, median | ITL, median | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for server in servers:
        speeds = [one.output_tokens_per_second for one in server.found]
        each = ", ".join(f"{speed:.0f}" for speed in speeds)
        ratio = "-"
        if best is not None:
            pairs = zip(speeds, (one.output_tokens_per_second for one in best.found), strict=True)
            ratio = f"{statistics.median(mine / theirs for mine, theirs in pairs):.2f}"
        failed = sum(one.failed for one in server.found)
        latencies = f"{_latency(server, 'ttft')} | {_latency(server, 'itl')}"
        lines.append(f"| {server.name} | {each} | {server.speed:.0f} | {ratio} | {latencies} | {failed} |")
    return lines


def _latency(server: Server, name: str) -> str:
    found = [one.latencies[name].percentiles["p50"] for one in server.found if name in one.latencies]
    return f"{statistics.median(found):.0f} ms" if found else "-"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.servers", description=__doc__)
    every = [*OURS, *MODES]
    add = parser.add_argument
    add("--vllm-python", type=Path, required=True, help="Python with vLLM")
    add("--pair", default="shaped:25M:1:0.8", help="as for tandem bench")
    add(
        "--servers",
        type=checked(_names),
        default=every,
        help="several with semicolons; NAME@THREADS for other threads",
    )
    add("--rounds", type=int, default=3, help="loads of each server that count")
    add("--clients", type=int, default=16, help="requests at once")
    add("--requests", type=int, default=64, help="of each load")
    add("--seed", type=int, default=3, help="of the lengths")
    add("--prompt-tokens", type=checked(Lengths.parse), default=Lengths.parse("32:0.3:64"))
    add("--output-tokens", type=checked(Lengths.parse), default=Lengths.parse("96:0.2:128"))
    add("--temperature", type=float, default=0.0)
    add("--tokens", type=int, default=4, help="K")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, help="of each model [default: each server's own default]")
    add("--max-length", type=int, default=512, help="tokens of a sequence")
    add("--ready-seconds", type=float, default=480.0, help="how long a server may take to start")
    add("--logs", type=Path, help="folder for what each server writes")
    add("--cache-folder", type=Path, default=CACHE_FOLDER)
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(";")]
    for name in names:
        if name.partition("@")[0] not in {*OURS, *MODES}:
            raise ValueError(f"{name!r} must be one of {'; '.join([*OURS, *MODES])}")
    return names


async def run(arguments: Sequence[str]) -> None:
    """Measure what a command line asks for. SIGTERM ends the servers too: those that are stopped could not end."""
    measuring = asyncio.ensure_future(main(parse(arguments)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    await measuring


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))

"""`python -m benchmarks.studies.vllm_server --vllm-python PYTHON`: Tandem over HTTP beside each mode of vLLM's server.

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
from typing import Any

from benchmarks.common import rotated
from benchmarks.load.clients import Origin, http_connection, origin_of, served_model
from benchmarks.load.cluster import free_port, tree
from benchmarks.load.figures import Arrival, Figures, Goodput, Lengths, arrivals, figures
from benchmarks.load.generator import send
from benchmarks.pairs import Pair, open_pair
from tandem.errors import ServiceUnavailableError, TandemError

ALONE, SPECULATIVE = "Tandem, target alone", "Tandem"
_OURS = {ALONE: False, SPECULATIVE: True}
_MODES: dict[str, str] = {"vLLM": "", "vLLM, ngram": "ngram", "vLLM, draft_model": "draft_model"}
SERVERS = (*_OURS, *_MODES)

_KV_CACHE_GIBIBYTES = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server starts."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def launch_of(name: str, options: argparse.Namespace, pair: Pair, port: int) -> Launch:
    """The command of a server.

    No server may reuse the prefixes of a prompt that an earlier round sent.

    Args:
        name: One of `SERVERS`, with @THREADS after it where the threads are not those of the options.
        options: Of `vllm_server`.
        pair: Target and draft.
        port: Where it is to listen for HTTP.
    """
    kind, _, number = name.partition("@")
    threads = int(number) if number else options.threads
    if kind in _OURS:
        return _tandem(options, pair, port, threads, has_draft=_OURS[kind])
    return _vllm(options, pair, port, threads, _MODES[kind])


def _tandem(
    options: argparse.Namespace, pair: Pair, port: int, threads: int | None, *, has_draft: bool
) -> Launch:
    command = [
        *(sys.executable, "-P", "-m", "coordinator.cli", "up", "--port", "0", "--http-port", str(port)),
        *("--target", str(pair.target), "--draft", str(pair.draft) if has_draft else "none"),
        *("--dtype", options.dtype, "--max-length", str(options.max_length)),
    ]
    if has_draft:
        command += ["--num-speculative-tokens", str(options.tokens)]
    if threads is not None:
        command += ["--threads", str(threads)]
    off = {f"TANDEM_{role}_ENABLE_PREFIX_CACHING": "false" for role in ("TARGET", "DRAFT")}
    return Launch(command, off)


def _vllm(options: argparse.Namespace, pair: Pair, port: int, threads: int | None, mode: str) -> Launch:
    command = [
        *(str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
        *("--port", str(port), "--model", str(pair.target), "--dtype", options.dtype),
        *("--max-model-len", str(options.max_length), "--max-num-seqs", str(options.clients)),
        "--no-enable-prefix-caching",
    ]
    if mode:
        command += ["--speculative-config", json.dumps(_speculation(mode, options, pair))]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIBIBYTES)}
    if threads is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    return Launch(command, environment)


def _speculation(mode: str, options: argparse.Namespace, pair: Pair) -> dict[str, Any]:
    config: dict[str, Any] = {"method": mode, "num_speculative_tokens": options.tokens}
    if mode == "ngram":
        return {**config, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return {**config, "model": str(pair.draft)}


_ASK_SECONDS = 0.5
_STOP_SECONDS = 30.0
_WARM_UP_REQUESTS = 16
_RESUME_SECONDS = 0.5
"""After a server goes on: what fell due while it was stopped happens before it is measured."""


@dataclass(slots=True)
class Server:
    """A server that runs."""

    name: str
    origin: Origin
    pid: int | None = None
    """Of the process whose tree serves; None: it was started elsewhere."""
    found: list[Figures] = field(default_factory=list)
    """One for each load that counts."""

    def pause(self) -> None:
        """Stop every process of it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            _signal_all(tree(self.pid), number)


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown; then the servers that did not start, with the reason."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    absent: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(TemporaryDirectory(prefix="tandem-servers-")))
        servers = []
        for name in options.servers:
            try:
                server = await stack.enter_async_context(started(name, options, pair, logs))
            except TandemError as error:
                absent[name] = str(error)
                continue
            sys.stderr.write(f"{name} is ready\n")
            server.pause()
            servers.append(server)
        if options.confirm:
            sys.stderr.write(
                f"processes: {' '.join(str(pid) for pid in _processes(servers))}; Enter begins\n"
            )
            await asyncio.to_thread(sys.stdin.readline)
        await measured(options, servers)
        sys.stdout.write(
            "\n".join([*table(servers), *(f"\n{name}: {absent[name]}" for name in absent)]) + "\n"
        )
        for server in servers:
            server.resume()


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
    server = Server(name, origin_of(f"http://127.0.0.1:{port}"), process.pid)
    try:
        await _wait_until_ready(server, process, log, options.ready_seconds)
        yield server
    finally:
        server.resume()
        await _end(server, process)


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


async def _end(server: Server, process: asyncio.subprocess.Process) -> None:
    left = tree(process.pid)
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            sys.stderr.write(f"{server.name} did not end by itself\n")
    _signal_all(left, signal.SIGKILL)
    await process.wait()


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to the processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def measured(options: argparse.Namespace, servers: Sequence[Server]) -> None:
    """Load the servers in turn; the first round warms up and does not count."""
    wanted = arrivals(options.requests, math.inf, options.seed, options.prompt_tokens, options.output_tokens)
    for number in range(-1, options.rounds):
        for server in rotated(servers, number):
            found = await _loaded(server, wanted, options)
            if number >= 0:
                server.found.append(found)
                sys.stderr.write(f"{server.name}: {found.output_tokens_per_second:.0f} tokens/s\n")


async def _loaded(server: Server, wanted: Sequence[Arrival], options: argparse.Namespace) -> Figures:
    server.resume()
    try:
        await asyncio.sleep(_RESUME_SECONDS)
        connect = partial(http_connection, server.origin, await served_model(server.origin))
        sent = partial(
            send, connect, clients=options.clients, temperature=options.temperature, is_paced=False
        )
        await sent(wanted[:_WARM_UP_REQUESTS])
        return figures(await sent(wanted), Goodput({}), [50.0, 99.0])
    finally:
        server.pause()


def table(servers: Sequence[Server]) -> list[str]:
    """The figures in Markdown. Ratios are medians of pairs of one round."""
    own = [server for server in servers if server.name.startswith("vLLM") and server.found]
    best = max(own, key=_speed, default=None)
    lines = [
        "| server | tokens/s of each round | median | by vLLM's best mode | TTFT, median | ITL, median | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for server in servers:
        each = ", ".join(f"{one.output_tokens_per_second:.0f}" for one in server.found)
        ratio = "-" if best is None else f"{_ratio(server, best):.2f}"
        failed = sum(one.failed for one in server.found)
        lines.append(
            f"| {server.name} | {each} | {_speed(server):.0f} | {ratio} | {_latency(server, 'ttft')} "
            f"| {_latency(server, 'itl')} | {failed} |"
        )
    return lines


def _speed(server: Server) -> float:
    return statistics.median(one.output_tokens_per_second for one in server.found)


def _ratio(server: Server, base: Server) -> float:
    return statistics.median(
        mine.output_tokens_per_second / theirs.output_tokens_per_second
        for mine, theirs in zip(server.found, base.found, strict=True)
    )


def _latency(server: Server, name: str) -> str:
    found = [one.latencies[name].percentiles["p50"] for one in server.found if name in one.latencies]
    return f"{statistics.median(found):.0f} ms" if found else "-"


def _processes(servers: Sequence[Server]) -> list[int]:
    own = [os.getpid()]
    return [*own, *(pid for server in servers if server.pid is not None for pid in tree(server.pid))]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.vllm_server", description=__doc__)
    add = parser.add_argument
    add("--vllm-python", type=Path, required=True, help="Python with vLLM")
    add("--pair", default="shaped:25M:1:0.8", help="as for tandem bench")
    add(
        "--servers",
        type=_names,
        default=list(SERVERS),
        help="several with semicolons; NAME@THREADS for other threads than --threads",
    )
    add("--rounds", type=int, default=3, help="loads of each server that count")
    add("--clients", type=int, default=16, help="requests at once")
    add("--requests", type=int, default=64, help="of each load")
    add("--seed", type=int, default=3, help="of the lengths")
    add("--prompt-tokens", type=Lengths.parse, default=Lengths.parse("32:0.3:64"))
    add("--output-tokens", type=Lengths.parse, default=Lengths.parse("96:0.2:128"))
    add("--temperature", type=float, default=0.0)
    add("--tokens", type=int, default=4, help="K")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, help="of each model [default: each server's own default]")
    add("--max-length", type=int, default=512, help="tokens of a sequence")
    add("--ready-seconds", type=float, default=480.0, help="how long a server may take to start")
    add("--confirm", action="store_true", help="wait for Enter when all servers are ready")
    add("--logs", type=Path, help="folder for what each server writes")
    add("--cache-folder", type=Path, default=Path.home() / ".cache" / "tandem" / "bench")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(";")]
    if unknown := [name for name in names if name.partition("@")[0] not in SERVERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {'; '.join(SERVERS)}")
    return names


async def run(arguments: Sequence[str]) -> None:
    """Measure what a command line asks for. SIGTERM ends the servers too: those that are stopped could not end."""
    measuring = asyncio.ensure_future(main(parse(arguments)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    await measuring


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))

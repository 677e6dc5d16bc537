"""`python -m benchmarks.coordinator_cost`: the processor time that a coordinator takes for a token.

    python -m benchmarks.coordinator_cost --streams 64 --rule residual
    python -m benchmarks.coordinator_cost --pairs 10 --against ../before

Each run starts a coordinator, two scripted services and the clients anew (`tandem bench --clients`), and then a stub:
a process that sends the same messages to an echo and the same chunks to as many clients, and does nothing else. What
a coordinator takes above the stub is its own work. With --against, the coordinator of another checkout takes turns
with this one's; that checkout has an environment of its own in `.venv`.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
import grpc.aio
import uvloop

from benchmarks.messages import TOKEN_IDS, round_of
from tandem.config.settings import load_settings
from tandem.model.types import RowKind
from tandem.v1 import draft_pb2, generation_pb2, target_pb2
from tandem.wire import draft, target
from tandem_load.common import Positive, StudySettings, one_sentence

HERE = Path(__file__).resolve().parents[1]
ACCEPTANCE = 0.72
"""Share of positions where the scripted draft is right, as `tandem bench` has it."""
TOKENS_PER_ROUND = (1 - ACCEPTANCE ** (len(TOKEN_IDS) + 1)) / (1 - ACCEPTANCE)
STUB_ROUNDS = 300
CONFIDENCE = 0.95


class CostSettings(StudySettings):
    """Options of the measurement."""

    streams: Positive = 64
    """Requests at once."""
    rule: Literal["greedy", "residual"] = "greedy"
    """Acceptance rule of the requests."""
    pairs: Positive = 1
    """Runs of each."""
    output_tokens: Positive = 200
    """Tokens of a request."""
    against: Path | None = None
    """Folder of another checkout."""
    stub: str = ""
    """HOST:PORT of an echo. The measurement starts itself with it, to play the stub."""


class Pair(NamedTuple):
    """Microseconds of a token in one turn of each."""

    stub: float
    here: float
    there: float | None
    tokens_per_second: float

    @property
    def ratio(self) -> float:
        """The time of this coordinator above the stub's, over that of the other one."""
        assert self.there is not None, "only with --against"
        return (self.here - self.stub) / (self.there - self.stub)


def main() -> None:
    """Measure, and print a table; as a stub, play the coordinator."""
    with one_sentence():
        settings = load_settings(CostSettings, sys.argv[1:], "python -m benchmarks.coordinator_cost")
        if settings.stub:
            uvloop.run(_play_coordinator(settings))
        else:
            sys.stdout.write(uvloop.run(_measure(settings)))


async def _measure(settings: CostSettings) -> str:
    pairs: list[Pair] = []
    for index in range(settings.pairs):
        stub = await measure_stub(settings)
        checkouts = [HERE] if settings.against is None else [HERE, settings.against.resolve()]
        if index % 2:
            checkouts.reverse()
        found = {checkout: await measure_coordinator(checkout, settings) for checkout in checkouts}
        here, speed = found.pop(HERE)
        there = next((cost for cost, _ in found.values()), None)
        pairs.append(Pair(stub, here, there, speed))
        sys.stderr.write(f"{pairs[-1]}\n")
    return table(pairs)


def table(pairs: Sequence[Pair]) -> str:
    """Medians, and the ratio of the two coordinators."""
    lines = [
        "| us of a core for a token | median | from | to |",
        "|---|---:|---:|---:|",
        _line("stub", [pair.stub for pair in pairs]),
        _line("coordinator", [pair.here for pair in pairs]),
        _line("coordinator, above the stub", [pair.here - pair.stub for pair in pairs]),
    ]
    others = [pair.there for pair in pairs if pair.there is not None]
    if others:
        lines.append(_line("the other coordinator", others))
        ratios = sorted(pair.ratio for pair in pairs)
        low, high = median_interval(ratios)
        lines.append("")
        lines.append(
            f"Above the stub, by the other: {statistics.median(ratios):.3f} "
            f"({CONFIDENCE:.0%} interval of the median {low:.3f} to {high:.3f}, {len(ratios)} pairs)"
        )
    speed = statistics.median(pair.tokens_per_second for pair in pairs)
    lines.append("")
    lines.append(f"{speed:.0f} tokens/s")
    return "\n".join(lines) + "\n"


def _line(name: str, values: Sequence[float]) -> str:
    return f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {max(values):.0f} |"


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The narrowest two of the ordered values between which the median lies with `CONFIDENCE`, whatever their
    distribution; the outermost two where there are too few. The number of values below the median is binomial."""
    count = len(ordered)
    outside = 0
    missed = 2 * math.comb(count, 0) / 2**count
    while missed + 2 * math.comb(count, outside + 1) / 2**count <= 1 - CONFIDENCE:
        outside += 1
        missed += 2 * math.comb(count, outside) / 2**count
    return ordered[outside], ordered[count - 1 - outside]


# ---- a coordinator before scripted services


async def measure_coordinator(checkout: Path, settings: CostSettings) -> tuple[float, float]:
    """Microseconds of a core for a token, and tokens per second, of a checkout's coordinator that has just started."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "load.json"
        process = await asyncio.create_subprocess_exec(
            checkout / ".venv" / "bin" / "tandem",
            *("bench", "--clients", str(settings.streams), "--requests", str(2 * settings.streams)),
            *("--prompt-tokens", "64", "--output-tokens", str(settings.output_tokens)),
            *("--rule", settings.rule, "--acceptance", str(ACCEPTANCE), "--json", str(result)),
            cwd=checkout,
            stdout=asyncio.subprocess.DEVNULL,
        )
        if await process.wait():
            sys.exit(f"the load of {checkout} ended with {process.returncode}")
        report = json.loads(result.read_text(encoding="utf-8"))
    milliseconds: float = report["used"]["coordinator"]["processor_milliseconds_per_token"]
    return 1000 * milliseconds, report["figures"]["output_tokens_per_second"]


# ---- a stub in its place


class Messages(NamedTuple):
    """A round's messages."""

    question: draft_pb2.ProposeRequest
    proposals: draft_pb2.ProposeResponse
    steps: target_pb2.VerifyRequest
    verifications: target_pb2.VerifyResponse


CHUNK = generation_pb2.GenerateResponse(
    text=" return",
    token_ids=TOKEN_IDS[: round(TOKENS_PER_ROUND)],
    drafted=[True] * (round(TOKENS_PER_ROUND) - 1) + [False],
    text_lengths=[3] * round(TOKENS_PER_ROUND),
    proposed_token_count=len(TOKEN_IDS),
)
"""A client's share of a round."""


def _messages(settings: CostSettings) -> Messages:
    row_kind = RowKind.TOKEN if settings.rule == "greedy" else RowKind.SUPPORT
    nouns = round_of(row_kind, settings.streams)
    return Messages(
        question=draft.requests_to_proto(nouns.questions),
        proposals=draft.answers_to_proto(nouns.proposals),
        steps=target.requests_to_proto(nouns.steps),
        verifications=target.answers_to_proto(nouns.verifications),
    )


async def measure_stub(settings: CostSettings) -> float:
    """Microseconds of a core for a token that a process takes which only sends and reads messages."""
    messages = _messages(settings)
    server = grpc.aio.server()
    handlers = {"draft": _echo(messages.proposals), "target": _echo(messages.verifications)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.coordinator_cost", "--stub", f"127.0.0.1:{port}"),
        *("--streams", str(settings.streams), "--rule", settings.rule),
        cwd=HERE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        clients = [asyncio.create_task(_read_chunks(address)) for _ in range(settings.streams)]
        await asyncio.gather(*clients)
        seconds = float(await process.stdout.readline())
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await server.stop(None)
    return 1e6 * seconds / (STUB_ROUNDS * settings.streams * TOKENS_PER_ROUND)


def _echo(answer: Any) -> Any:
    """A method that answers each message of a stream by the same one."""
    content = answer.SerializeToString()

    async def respond(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for _request in requests:
            yield content

    return grpc.stream_stream_rpc_method_handler(respond)


async def _read_chunks(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        generate: Any = channel.unary_stream("/stub/Generate")
        async for _ in generate(b""):
            pass


async def _play_coordinator(settings: CostSettings) -> None:
    """Take rounds with an echo for as many clients; print an address, and the processor seconds in the end."""
    messages = _messages(settings)
    rounds: list[asyncio.Queue[bool]] = []
    is_complete = asyncio.Event()

    async def generate(_request: bytes, _context: object) -> AsyncIterator[generation_pb2.GenerateResponse]:
        waiting: asyncio.Queue[bool] = asyncio.Queue()
        rounds.append(waiting)
        if len(rounds) == settings.streams:
            is_complete.set()
        while await waiting.get():
            yield CHUNK

    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(
        generate, response_serializer=generation_pb2.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("stub", {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await is_complete.wait()
    async with grpc.aio.insecure_channel(settings.stub) as channel:
        ask = channel.stream_stream(
            "/echo/draft",
            draft_pb2.ProposeRequest.SerializeToString,
            draft_pb2.ProposeResponse.FromString,
        )()
        verify = channel.stream_stream(
            "/echo/target",
            target_pb2.VerifyRequest.SerializeToString,
            target_pb2.VerifyResponse.FromString,
        )()
        began = time.process_time()
        for _ in range(STUB_ROUNDS):
            await ask.write(messages.question)
            await ask.read()
            await verify.write(messages.steps)
            await verify.read()
            for waiting in rounds:
                waiting.put_nowait(True)
        for waiting in rounds:
            waiting.put_nowait(False)
        await server.stop(60)
        sys.stdout.write(f"{time.process_time() - began}\n")


if __name__ == "__main__":
    main()

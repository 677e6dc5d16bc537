"""`python -m benchmarks.studies.hostile`: what others notice of clients that mean harm.

`inputs`: 64 clients send the largest inputs that are allowed, over and over, while `/health` is asked and another
client streams. `http-readers` and `grpc-readers`: 300 streams of one address are never read; good requests of another
address are timed before, while they come, and afterwards. `http-readers-of-many-addresses`: the same from 250. The
clients are a process of their own, on the same cores as the services.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import httpx

from benchmarks.common import service
from benchmarks.pairs import DEMO
from tandem.client import Client
from tandem.types import GenerationRequest

CLIENTS = 64
READERS = 300
SECONDS = 20.0
OPENING_SECONDS = 4.0
SETTLED_SECONDS = 120.0
"""All readers have to be served until they do not read, and then wait for a second."""
GOOD_REQUESTS = 30
_HEALTH_PAUSE_SECONDS = 0.01
_READY = "attacking"
_GOOD_ADDRESS = "127.0.0.9"
"""Requests of one client address are bounded, so the good client has one of its own."""
_MESSAGES = 2048


@asynccontextmanager
async def _services() -> AsyncIterator[tuple[str, int]]:
    """Run the demo pair behind a coordinator; its gRPC address and HTTP port."""
    async with AsyncExitStack() as stack:
        models = [
            await stack.enter_async_context(service(f"{role}_service", "--model", str(DEMO / role)))
            for role in ("target", "draft")
        ]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        addresses = ("--target-address", models[0], "--draft-address", models[1])
        coordinator = service("coordinator", *addresses, "--http-port", str(port))
        yield await stack.enter_async_context(coordinator), port


@asynccontextmanager
async def _attack(kind: str, address: str, port: int) -> AsyncIterator[None]:
    """Run the clients in a process of their own."""
    command = ["-P", "-m", "benchmarks.studies.hostile", *sys.argv[1:], "--attack", kind, address, str(port)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        while _READY not in (line := (await process.stdout.readline()).decode()):
            if not line:
                raise RuntimeError(f"the attack ended with exit code {await process.wait()}")
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# ---- what is measured


async def _health(http: httpx.AsyncClient, until: float) -> list[float]:
    """Seconds of each answer of /health."""
    found = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        (await http.get("/health")).raise_for_status()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(_HEALTH_PAUSE_SECONDS)
    return found


async def _gaps(client: Client, until: float) -> list[float]:
    """Seconds between the chunks of streams that follow each other."""
    found = []
    while time.perf_counter() < until:
        last = None
        async for _ in client.generate(GenerationRequest((5, 9, 17), max_tokens=200, ignore_eos=True)):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now
    return found


async def _inputs(address: str, port: int, seconds: float) -> list[str]:
    lines = []
    async with Client(address) as client, _http(port) as http:
        for name in ("alone", f"beside {CLIENTS} clients"):
            async with AsyncExitStack() as stack:
                if name != "alone":
                    await stack.enter_async_context(_attack("inputs", address, port))
                until = time.perf_counter() + seconds
                health, gaps = await asyncio.gather(_health(http, until), _gaps(client, until))
            lines.append(f"{name}: /health {_described(health)}; between chunks {_described(gaps)}")
    return lines


async def _readers(kind: str, address: str, port: int, seconds: float) -> list[str]:
    del seconds
    lines = []
    async with _http(port) as http:
        for name in ("alone", f"beside {READERS} readers"):
            async with AsyncExitStack() as stack:
                if name != "alone":
                    await stack.enter_async_context(_attack(kind, address, port))
                    came = await _until_stalled(http)
                    said = f"{1e3 * came[0]:.1f} ms at first, then {_described(came)}"
                    lines.append(f"{kind}, while they arrive: a request of 16 tokens {said}")
                found = [await _good_request(http, number) for number in range(GOOD_REQUESTS)]
            lines.append(f"{kind}, {name}: a request of 16 tokens {_described(found)}")
    return lines


async def _until_stalled(http: httpx.AsyncClient) -> list[float]:
    """Seconds of good requests, one after another, until the readers have given up their places."""
    deadline = time.perf_counter() + SETTLED_SECONDS
    found = [await _good_request(http, 0)]
    while count := await _sequences(http):
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{count} readers still hold places after {SETTLED_SECONDS:g} s")
        found.append(await _good_request(http, len(found)))
    return found


async def _sequences(http: httpx.AsyncClient) -> int:
    """Sequences that are open or wait on the target."""
    replicas = (await http.get("/tandem/status")).json()["replicas"]
    return sum(int(replica["open_sequences"]) for replica in replicas if replica["role"] == "target")


async def _good_request(http: httpx.AsyncClient, number: int) -> float:
    began = time.perf_counter()
    body = {
        "prompt": [5, 9, number % 1000],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return time.perf_counter() - began


def _http(port: int) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=_GOOD_ADDRESS)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60.0)


def _described(seconds: Sequence[float]) -> str:
    ordered = sorted(each * 1e3 for each in seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"median {statistics.median(ordered):.1f} ms, p99 {p99:.1f} ms, longest {ordered[-1]:.1f} ms "
        f"({len(ordered)})"
    )


# ---- the attacks


async def _send_inputs(address: str, port: int) -> None:
    """Send the largest inputs from so many clients, for ever."""
    del address
    bodies = await _largest(port)
    _say_ready()

    async def send(number: int) -> None:
        chance = random.Random(number)
        transport = httpx.AsyncHTTPTransport(local_address=f"127.0.1.{number + 1}")
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=120.0
        ) as http:
            while True:
                path, content = chance.choice(bodies)
                with suppress(httpx.HTTPError):
                    await http.post(path, content=content, headers={"content-type": "application/json"})

    await asyncio.gather(*(send(number) for number in range(CLIENTS)))


async def _largest(port: int) -> list[tuple[str, bytes]]:
    """The longest text, the longest chat and the most token ids that the coordinator reads."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
        models = (await http.get("/v1/models")).json()
        length = int(models["data"][0]["max_model_len"])
        refusal = await http.post("/v1/completions", json={"prompt": "a" * 3_000_000, "max_tokens": 1})
        found = re.search(r"at most (\d+)", refusal.json()["error"]["message"])
    assert found is not None, refusal.text
    text = ("the quick brown fox " * (int(found[1]) // 20 + 1))[: int(found[1])]
    chat = [{"role": "user", "content": "x" * (len(text) // _MESSAGES // 2)}] * _MESSAGES
    ids = [7] * (length - 1)
    return [
        ("/v1/completions", json.dumps({"prompt": text, "max_tokens": 1}).encode()),
        ("/v1/chat/completions", json.dumps({"messages": chat, "max_tokens": 1}).encode()),
        ("/v1/completions", json.dumps({"prompt": ids, "max_tokens": 1}).encode()),
        ("/tokenize", json.dumps({"prompt": text}).encode()),
    ]


async def _stall_http(address: str, port: int, addresses: int = 1) -> None:
    """Ask for so many long streams, from so many addresses, and read none of them."""
    del address
    body = json.dumps(
        {"prompt": [5, 9], "max_tokens": 400, "logprobs": 20, "stream": True, "ignore_eos": True}
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stalled = []
    for number in range(READERS):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.bind((f"127.0.2.{number % addresses + 1}", 0))
        reader.connect(("127.0.0.1", port))
        reader.sendall((head + body).encode())
        stalled.append(reader)
    _say_ready()
    await asyncio.Event().wait()


async def _stall_grpc(address: str, port: int) -> None:
    """The same over gRPC."""
    del port
    request = GenerationRequest((5, 9), max_tokens=400, logprobs=20, ignore_eos=True)
    async with Client(address) as client:
        streams = [aiter(client.generate(request)) for _ in range(READERS)]
        # Those that get nothing in time stay: they go on waiting for their places.
        await asyncio.wait(
            [asyncio.ensure_future(anext(stream)) for stream in streams], timeout=OPENING_SECONDS
        )
        _say_ready()
        await asyncio.Event().wait()


def _say_ready() -> None:
    sys.stdout.write(_READY + "\n")
    sys.stdout.flush()


_ATTACKS: dict[str, Callable[[str, int], Coroutine[None, None, None]]] = {
    "inputs": _send_inputs,
    "http-readers": _stall_http,
    "http-readers-of-many-addresses": partial(_stall_http, addresses=250),
    "grpc-readers": _stall_grpc,
}


async def main(kinds: Sequence[str], seconds: float) -> None:
    """Measure each kind with services of its own, and print a line for each figure."""
    for kind in kinds:
        async with _services() as (address, port):
            if kind == "inputs":
                lines = await _inputs(address, port, seconds)
            else:
                lines = await _readers(kind, address, port, seconds)
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.hostile", description=__doc__)
    parser.add_argument("kind", nargs="*", choices=[*_ATTACKS, []], help="all of them by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement of inputs")
    parser.add_argument("--niceness", type=int, default=0,
                        help="of the hostile clients: with 19 they take what services and measurement leave of the "
                        "processor, as clients on another machine would")  # fmt: skip
    parser.add_argument("--attack", nargs=3, metavar=("KIND", "ADDRESS", "PORT"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    if options.attack:
        kind, address, port = options.attack
        os.nice(options.niceness)
        asyncio.run(_ATTACKS[kind](address, int(port)))
    else:
        asyncio.run(main(options.kind or [*_ATTACKS], options.seconds))

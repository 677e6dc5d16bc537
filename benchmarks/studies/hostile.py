"""Delays that others see beside clients that mean harm: `python -m benchmarks.studies.hostile`.

`inputs`: 64 clients send the largest inputs that are allowed, over and over, while `/health` is asked and another
client streams. `http-readers` and `grpc-readers`: 300 streams of one address are never read; good requests of another
address are timed before, until all readers have given up their places, and afterwards.
`http-readers-of-many-addresses`: the same from 250. The clients are a process of their own, on the same cores as the
services.

A target computes for 32 sequences at once, so the readers take turns: each gets tokens until its buffers are full, and
has stalled a second later. How long all of that takes is up to the machine; how many tokens they got is not.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Literal

import grpc
import httpx2
import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client, as_message
from tandem.config.settings import load_settings
from tandem.model.types import GenerationRequest
from tandem.model_sources.bundled import DEMO
from tandem.serving.standard_streams import write_out
from tandem.telemetry.logs import LogLevel
from tandem.v1.generation_pb2_grpc import GenerationServiceStub
from tandem_coordinator.settings.coordinator import MAX_CHAT_MESSAGES
from tandem_load.common import Listed, StudySettings, free_port, one_sentence, service

CLIENTS = 64
"""A quarter of the requests that a coordinator runs by default."""
READERS = 300
"""More than the 256 requests that a coordinator runs by default."""
STUCK_SECONDS = 30.0
"""Readers that hold places for so long without a token keep what they should give up. A busy machine makes tokens
slowly, but it makes them. Less than the 60 s after which a reader's connection is closed, which frees its place too."""
PROGRESS_SECONDS = 10.0
"""Between two lines that say how far the readers are."""
_GOOD_TOKENS = 16
_READY = "ready on the attacked ports\n"
"""The line of a service that has started."""
_GOOD_ADDRESS = "127.0.0.9"
"""Requests of one client address are bounded, so the good client has one of its own."""


# ---- the measurements


async def _inputs(address: str, port: int, seconds: float) -> AsyncIterator[str]:
    async with Client(address) as client, _http(port) as http:
        attack = _attack("inputs", address, port)
        for name, beside in (("alone", nullcontext()), (f"beside {CLIENTS} clients", attack)):
            async with beside:
                until = time.perf_counter() + seconds
                health, gaps = await asyncio.gather(_health(http, until), _gaps(client, until))
            yield f"{name}: /health {_described(health)}; between chunks {_described(gaps)}"


async def _health(http: httpx2.AsyncClient, until: float) -> list[float]:
    found = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        (await http.get("/health")).raise_for_status()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    return found


async def _gaps(client: Client, until: float) -> list[float]:
    found: list[float] = []
    request = GenerationRequest((5, 9, 17), max_tokens=200, ignore_eos=True)
    while time.perf_counter() < until:
        moments = [time.perf_counter() async for _ in client.generate(request)]
        found += (later - sooner for sooner, later in pairwise(moments))
    return found


async def _readers(kind: str, address: str, port: int) -> AsyncIterator[str]:
    # A good request may take as long as all readers that came before it
    async with _http(port, timeout=None) as http, AdminClient(address) as admin:
        good = 0

        async def request() -> float:
            """Seconds of a good request."""
            nonlocal good
            began = time.perf_counter()
            body = {
                "prompt": [5, 9, good % 1000],
                "max_tokens": _GOOD_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            (await http.post("/v1/completions", json=body)).raise_for_status()
            good += 1
            return time.perf_counter() - began

        async def held() -> int:
            """Places on the target that are taken: none once the readers have given theirs up."""
            replicas = (await http.get("/tandem/status")).json()["replicas"]
            return sum(int(each["open_sequences"]) for each in replicas if each["role"] == "target")

        async def got() -> tuple[int, int]:
            """Tokens of all readers, and how many of them have their whole completion."""
            stats = await admin.stats()
            return stats.completion_tokens - _GOOD_TOKENS * good, stats.outcomes.completed - good

        async def arrive() -> list[float]:
            """Seconds of good requests, one after another, until no reader holds a place any more."""
            came = [await request()]
            while await held():
                came.append(await request())
            return came

        alone = [await request() for _ in range(30)]
        yield f"{kind}, alone: a request of {_GOOD_TOKENS} tokens {_described(alone)}"
        async with _attack(kind, address, port):
            began = moved = time.perf_counter()
            most = 0
            arriving = asyncio.create_task(arrive())
            try:
                while not (await asyncio.wait({arriving}, timeout=PROGRESS_SECONDS))[0]:
                    now = time.perf_counter()
                    places = await held()
                    (tokens, _) = await got()
                    yield f"{kind}, after {now - began:.0f} s: {places} sequences open, {tokens:,} tokens so far"
                    # Those of the good request that runs are among them
                    if tokens > most + _GOOD_TOKENS:
                        most = tokens
                        moved = now
                    elif now - moved > STUCK_SECONDS:
                        raise TimeoutError(
                            f"{places} sequences stay open without a token for {now - moved:.0f} s"
                        )
                came = await arriving
            finally:
                arriving.cancel()
            seconds = time.perf_counter() - began
            (tokens, whole) = await got()
            yield f"{kind}, while they arrive: {1e3 * came[0]:.1f} ms at first, then {_described(came)}"
            yield (
                f"{kind}, no place held after {seconds:.0f} s: {READERS} readers got {tokens:,} tokens, and {whole} of "
                "them a whole completion"
            )
            beside = _described([await request() for _ in range(30)])
            yield f"{kind}, beside {READERS} readers: {beside}"


def _http(port: int, local_address: str = _GOOD_ADDRESS, timeout: float | None = 120.0) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(local_address=local_address)
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=timeout)


def _described(seconds: Sequence[float]) -> str:
    median, p99, longest = (1e3 * float(each) for each in np.percentile(seconds, (50, 99, 100)))
    return f"median {median:.1f} ms, p99 {p99:.1f} ms, longest {longest:.1f} ms ({len(seconds)})"


# ---- the attacks


def _attack(kind: str, address: str, port: int) -> AbstractAsyncContextManager[str]:
    return service("benchmarks.studies.hostile", "--attack", kind, address, str(port))


async def _send_inputs(address: str, port: int) -> None:
    """Send the largest inputs from so many clients, for ever."""
    bodies = await _largest(port)
    write_out(_READY)

    async def send(number: int) -> None:
        chance = random.Random(number)
        async with _http(port, f"127.0.1.{number + 1}") as http:
            while True:
                path, content = chance.choice(bodies)
                with suppress(httpx2.HTTPError):
                    await http.post(path, content=content, headers={"content-type": "application/json"})

    await asyncio.gather(*(send(number) for number in range(CLIENTS)))


async def _largest(port: int) -> list[tuple[str, bytes]]:
    """The longest text, the longest chat and the most token ids that the coordinator reads."""
    async with _http(port) as http:
        length = int((await http.get("/v1/models")).json()["data"][0]["max_model_len"])
        refusal = await http.post("/v1/completions", json={"prompt": "a" * 3_000_000, "max_tokens": 1})
    found = re.search(r"at most (\d+)", refusal.json()["error"]["message"])
    assert found is not None, refusal.text
    text = ("the quick brown fox " * (int(found[1]) // 20 + 1))[: int(found[1])]
    chat = [{"role": "user", "content": "x" * (len(text) // MAX_CHAT_MESSAGES // 2)}] * MAX_CHAT_MESSAGES
    return [
        ("/v1/completions", json.dumps({"prompt": text, "max_tokens": 1}).encode()),
        ("/v1/chat/completions", json.dumps({"messages": chat, "max_tokens": 1}).encode()),
        ("/v1/completions", json.dumps({"prompt": [7] * (length - 1), "max_tokens": 1}).encode()),
        ("/tokenize", json.dumps({"prompt": text}).encode()),
    ]


async def _stall_http(address: str, port: int, addresses: int = 1) -> None:
    """Ask for so many long streams, from so many addresses, and read none of them."""
    wanted = {"prompt": [5, 9], "max_tokens": 400, "logprobs": 20, "stream": True, "ignore_eos": True}
    body = json.dumps(wanted)
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
    write_out(_READY)
    await asyncio.Event().wait()


async def _stall_grpc(address: str, port: int) -> None:
    """As over HTTP. The window stays small: a default one grows until it holds a whole completion that nobody reads."""
    request = as_message(GenerationRequest((5, 9), max_tokens=400, logprobs=20, ignore_eos=True))
    window = (("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(address, options=window) as channel:
        stub = GenerationServiceStub(channel)
        calls = [stub.Generate(request) for _ in range(READERS)]
        first = [asyncio.ensure_future(call.read()) for call in calls]
        # Readers that get no first chunk go on waiting for their places
        await asyncio.wait(first, timeout=4.0)
        write_out(_READY)
        await asyncio.Event().wait()


Attack = Literal["inputs", "http-readers", "http-readers-of-many-addresses", "grpc-readers"]

_ATTACKS: dict[str, Callable[[str, int], Coroutine[None, None, None]]] = {
    "inputs": _send_inputs,
    "http-readers": _stall_http,
    "http-readers-of-many-addresses": partial(_stall_http, addresses=250),
    "grpc-readers": _stall_grpc,
}


class HostileSettings(StudySettings):
    """Options of the measurements."""

    kind: CliPositionalArg[Listed[Attack]] = ()
    """Attacks to measure. By default all of them."""
    seconds: float = Field(default=20.0, gt=0)
    """Duration of each measurement of inputs."""
    attack: Listed[str] = ()
    """KIND HOST:PORT HTTP_PORT. The measurement starts itself with these, to play the clients that mean harm."""
    port: int = 0
    """Without effect: services are started with it."""
    log_level: LogLevel = "warning"
    """Likewise."""


async def main(settings: HostileSettings) -> None:
    """Measure each kind with services of its own, and print a line for each figure."""
    for kind in settings.kind or _ATTACKS:
        port = free_port()
        async with service("tandem", "up", "--model", DEMO, "--http-port", str(port)) as address:
            is_inputs = kind == "inputs"
            lines = _inputs(address, port, settings.seconds) if is_inputs else _readers(kind, address, port)
            async for line in lines:
                write_out(f"{line}\n")


if __name__ == "__main__":
    with one_sentence():
        settings = load_settings(HostileSettings, sys.argv[1:], "python -m benchmarks.studies.hostile")
        if settings.attack:
            kind, address, port = settings.attack
            asyncio.run(_ATTACKS[kind](address, int(port)))
        else:
            asyncio.run(main(settings))

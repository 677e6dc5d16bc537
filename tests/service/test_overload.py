"""Too much at once: what is let in is unharmed, the rest is refused at once, and nothing grows without bound."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import median

import grpc.aio
import pytest

from coordinator.requests.large_requests import GENERATE
from tandem.clients.aio import Client
from tandem.clients.retries import Retries
from tandem.errors import CapacityError, DeadlineError
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2_grpc, generation_pb2, target_pb2_grpc
from tandem.wire.generation import chunk_from_proto, request_to_proto
from tandem.wire.status import retry_after_seconds
from tests.end_to_end.processes import Process, address_of, coordinator
from tests.service.clients import complete, until
from tests.service.fakes import Fake, FakeDraft, FakeTarget, cluster, serving
from tests.service.rush import Answer, rush

logger = logging.getLogger(__name__)
"""Figures for docs/reliability.md: `make soak` shows them."""

pytestmark = pytest.mark.slow

REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, num_speculative_tokens=4)
EXPECTED = tuple(range(11, 51))

TEST_SECONDS = 300.0
"""Bound on a hang."""
MAX_MIB = 300
LONG = 100_000
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))


def again(tokens: Sequence[int]) -> int:
    """The same token again."""
    return tokens[-1]


class Endless(Fake):
    """Says the same again and again, for much longer than the others."""

    def __init__(self) -> None:
        super().__init__(again)
        self.model_info = replace(self.model_info, max_length=LONG)

    def open(self, max_length: int) -> None:
        self.opened += 1


class EndlessTarget(Endless, FakeTarget):
    """The target of such a pair."""


class EndlessDraft(Endless, FakeDraft):
    """The draft of such a pair."""


@dataclass(frozen=True)
class Front:
    """A coordinator in a process of its own, over fakes in this one."""

    process: Process
    address: str

    def mebibytes(self, figure: str = "VmRSS") -> int:
        """Resident memory of the process: VmRSS now, VmHWM at its highest."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition(f"{figure}:")[2].split()[0]) // 1024


@asynccontextmanager
async def front(target: FakeTarget, draft: FakeDraft | None, *options: str) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(
            serving(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
        )
        draft_address = None
        if draft is not None:
            draft_address, _ = await stack.enter_async_context(
                serving(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
            )
        process = stack.enter_context(
            # Many would leave the draft out.
            coordinator(
                target_address,
                draft_address,
                "--speculation-policy",
                "fixed",
                "--log-level",
                "warning",
                *options,
            )
        )
        # The fakes answer from this loop, so nothing may wait in it.
        yield Front(process, await asyncio.to_thread(address_of, process))
        assert "unexpected error" not in process.stderr, process.stderr[-4000:]


@pytest.mark.parametrize("streams", [200, pytest.param(1000, marks=pytest.mark.soak)])
async def test_many_streams_at_once(streams: int) -> None:
    target, draft = FakeTarget(), FakeDraft()
    options = ("--max-concurrent-requests", str(streams))
    async with asyncio.timeout(TEST_SECONDS), front(target, draft, *options) as coordinator_:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client(coordinator_.address)) for _ in range(streams // 100)
            ]
            gathered = await asyncio.gather(
                *(complete(clients[index % len(clients)], REQUEST) for index in range(streams))
            )
        peak = coordinator_.mebibytes("VmHWM")
    assert {completed.token_ids for completed in gathered} == {EXPECTED}
    assert peak <= MAX_MIB
    logger.info("%d streams, at most %d MiB", streams, peak)


@dataclass(frozen=True)
class Attempt:
    """What became of a request."""

    token_ids: tuple[int, ...] | None
    """None: it was refused."""
    seconds: float
    retry_after_seconds: float | None = None


async def attempt(client: Client) -> Attempt:
    began = time.perf_counter()
    try:
        completed = await complete(client, REQUEST)
    except CapacityError as error:
        return Attempt(None, time.perf_counter() - began, error.retry_after_seconds)
    return Attempt(completed.token_ids, time.perf_counter() - began)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collection of what this process has imported stands between an answer and the clock."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


Send = Callable[[int], Awaitable[list[Attempt]]]
"""Sends so many requests at once."""


@asynccontextmanager
async def clients(address: str) -> AsyncIterator[Send]:
    """Clients, all in this process, which are a good part of what they measure."""
    async with Client(address, retries=Retries(attempts=1)) as client:

        async def send(count: int) -> list[Attempt]:
            return await asyncio.gather(*(attempt(client) for _ in range(count)))

        yield send


@asynccontextmanager
async def wire(address: str) -> AsyncIterator[Send]:
    """What the same is without what the clients take."""
    message: generation_pb2.GenerateRequest = request_to_proto(REQUEST)
    async with rush(address) as connection:

        async def send(count: int) -> list[Attempt]:
            return [
                as_attempt(one) for one in await connection.ask(GENERATE, message.SerializeToString(), count)
            ]

        yield send


def as_attempt(answer: Answer) -> Attempt:
    assert answer.seconds is not None
    if answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
        return Attempt(None, answer.seconds, retry_after_seconds(answer.trailing_metadata))
    assert answer.code == grpc.StatusCode.OK.value[0]
    chunks = [
        chunk_from_proto(generation_pb2.GenerateResponse.FromString(message)) for message in answer.messages
    ]
    return Attempt(tuple(token for chunk in chunks for token in chunk.token_ids), answer.seconds)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("sender", [clients, wire])
@pytest.mark.parametrize("waves", [1, pytest.param(20, marks=pytest.mark.soak)])
async def test_ten_times_as_many_as_may_run(
    waves: int, sender: Callable[[str], AbstractAsyncContextManager[Send]]
) -> None:
    at_once = 8
    target, draft = FakeTarget(), FakeDraft()
    target.step_seconds = 0.05
    options = ("--max-concurrent-requests", "4", "--max-queued-requests", "4")
    refused: list[Attempt] = []
    undisturbed: list[float] = []
    async with (
        asyncio.timeout(TEST_SECONDS),
        front(target, draft, *options) as coordinator_,
        sender(coordinator_.address) as send,
    ):
        await send(1)
        for _ in range(waves):
            stolen = stolen_ticks()
            attempts = await send(10 * at_once)
            admitted = [one for one in attempts if one.token_ids is not None]
            told = [one for one in attempts if one.token_ids is None]
            refused += told
            if stolen_ticks() == stolen:
                undisturbed += [one.seconds for one in told]
            assert at_once <= len(admitted) < 10 * at_once  # a rush on a busy machine is no single moment
            assert {one.token_ids for one in admitted} == {EXPECTED}
    assert all(one.retry_after_seconds is not None and one.retry_after_seconds > 0 for one in refused)
    logger.info(
        "80 at once, %s: %d refusals, p99 %.3f s; %d while no processor was taken away, p99 %.3f s",
        sender.__name__,
        len(refused),
        p99([one.seconds for one in refused]),
        len(undisturbed),
        p99(undisturbed or [nan]),
    )


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.soak)])
async def test_ten_times_the_rate_that_can_be_served(seconds: float) -> None:
    """Arrivals do not wait for each other, as those of clients that know nothing of each other."""
    target, draft = FakeTarget(), FakeDraft()
    target.step_seconds = 0.05
    options = ("--max-concurrent-requests", "4", "--max-queued-requests", "4")
    async with (
        asyncio.timeout(TEST_SECONDS),
        front(target, draft, *options) as coordinator_,
        Client(coordinator_.address, retries=Retries(attempts=1)) as client,
    ):
        alone = await attempt(client)
        interval = alone.seconds / 4 / 10
        tasks = []
        began = time.monotonic()
        for number in range(int(seconds / interval)):
            await asyncio.sleep(began + number * interval - time.monotonic())
            tasks.append(asyncio.create_task(attempt(client)))
        attempts = await asyncio.gather(*tasks)
    admitted = [one for one in attempts if one.token_ids is not None]
    refused = [one for one in attempts if one.token_ids is None]
    assert {one.token_ids for one in admitted} == {EXPECTED}
    assert len(refused) > len(admitted) > 0
    assert all(one.retry_after_seconds is not None and one.retry_after_seconds > 0 for one in refused)
    logger.info(
        "%.0f a second: %d refusals, p99 %.3f s; %d admitted, which take %.2f s alone and %.2f s (median) here",
        1 / interval,
        len(refused),
        p99([one.seconds for one in refused]),
        len(admitted),
        alone.seconds,
        median(one.seconds for one in admitted),
    )


def stolen_ticks() -> int:
    """How long the machine's processors did something for other machines, in hundredths of a second (proc_stat(5))."""
    return int(Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[8])


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


@pytest.mark.parametrize("stalled_seconds", [1.0, pytest.param(60.0, marks=pytest.mark.soak)])
async def test_a_reader_that_stalls_beside_good_ones(stalled_seconds: float) -> None:
    target = EndlessTarget()
    options = (
        *("--stalled-reader-timeout-seconds", str(stalled_seconds)),
        # Later than that: the target lets go of the sequence when the stream ends, not when it gives up its places.
        *("--stalled-stream-seconds", str(stalled_seconds + 60.0)),
    )
    async with (
        asyncio.timeout(TEST_SECONDS),
        front(target, EndlessDraft(), *options) as coordinator_,
        Client(coordinator_.address) as client,
        grpc.aio.insecure_channel(coordinator_.address, options=SMALL_WINDOW) as channel,
    ):
        await complete(client, REQUEST)
        before = coordinator_.mebibytes()
        stalled = await stall(channel)
        good = await asyncio.gather(*(complete(client, REQUEST) for _ in range(16)))
        assert all(completed.token_ids == (10,) * 40 for completed in good)
        await until(lambda: target.running == 0, stalled_seconds + 60.0)
        grown = coordinator_.mebibytes() - before
        assert grown <= 32
        with suppress(grpc.aio.AioRpcError):
            while await stalled.read():  # what was on its way, and then the reason
                pass
        assert await stalled.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    logger.info("a reader stalled for %g s, %d MiB more", stalled_seconds, grown)


async def stall(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    """A request that begins and whose reader then takes nothing."""
    message: generation_pb2.GenerateRequest = request_to_proto(
        # Long proposals make large pieces, which fill the window soon.
        replace(REQUEST, max_tokens=LONG - 10, num_speculative_tokens=32)
    )
    call: grpc.aio.UnaryStreamCall[bytes, bytes] = channel.unary_stream(GENERATE)(message.SerializeToString())  # type: ignore[arg-type]
    await call.read()
    return call


@pytest.mark.parametrize(("step_seconds", "tokens"), [(30.0, "0"), (0.05, "[1-9]")])
async def test_the_clients_deadline_bounds_every_wait(step_seconds: float, tokens: str) -> None:
    """Before the first token, and between two."""
    target = FakeTarget()
    target.step_seconds = step_seconds
    deadline = 0.3
    async with asyncio.timeout(TEST_SECONDS), cluster(target, None) as client:
        began = time.monotonic()
        sentence = rf"longer than the 0\.3 s it was given; {tokens} tokens? (was|were) delivered"
        with pytest.raises(DeadlineError, match=sentence):
            async for _ in client.generate(REQUEST, timeout_seconds=deadline):
                pass
        assert time.monotonic() - began < 10 * deadline
        await until(lambda: target.running == 0, 5.0)

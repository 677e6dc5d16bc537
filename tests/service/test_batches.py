"""Thousands of requests in one call: each has one result, few are read at a time, and nobody waits for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.clients.client import NO_RETRIES, BatchResult, Client, Retries
from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    ServiceUnavailableError,
)
from tandem.model.types import BatchItem, BatchOutcome, FinishReason, GenerationRequest, RowKind
from tandem.serving.interceptors import Context
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from tandem.wire.generation import error_to_proto
from tandem.wire.status import Ending
from tandem_coordinator.requests import batch
from tandem_coordinator.requests.admission import MAX_BATCHES
from tandem_coordinator.requests.batch import MAX_UNREAD, Batch
from tests.service.clients import until
from tests.service.fakes import FakeDraft, FakeTarget, GenerateOnly, cluster, fleet, paced, serving

SHORT: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}


def prompts(count: int, taken: list[int] | None = None) -> Iterator[tuple[int, ...]]:
    """Prompts whose completions differ, and a note of each that was taken."""
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield (10 + number % 500,)


def expected(index: int) -> tuple[int, ...]:
    start = 10 + index % 500
    return (start + 1, start + 2)


async def collect(results: AsyncIterator[BatchResult]) -> dict[int, BatchResult]:
    found: dict[int, BatchResult] = {}
    async for result in results:
        assert result.index not in found, "one result each"
        found[result.index] = result
    return found


async def test_each_of_two_thousand_prompts_has_its_own_result() -> None:
    target = FakeTarget()
    draft = FakeDraft()
    async with cluster(target, draft, max_concurrent_requests=16, max_queued_requests=0) as client:
        found = await collect(client.generate_many(prompts(2000), **SHORT))
    assert sorted(found) == [*range(2000)]
    for index, result in found.items():
        assert result.completed is not None
        assert result.completed.token_ids == expected(index)
        assert result.completed.finish_reason is FinishReason.LENGTH
        assert result.completed.summary.prompt_tokens == 1
    assert len({each.completed.summary.seed for each in found.values() if each.completed}) == 2000
    assert target.running == draft.running == 0


async def test_results_come_in_the_order_in_which_completions_end() -> None:
    """The first prompt's completion is the longest."""
    requests = [GenerationRequest((10,), max_tokens=40), GenerationRequest((10,), max_tokens=1)]
    async with cluster(paced(0.02)) as client:
        order = [result.index async for result in client.generate_many(requests, temperature=0.0)]
    assert order == [1, 0]


async def test_only_those_with_a_place_run_and_few_more_are_read() -> None:
    """The bound is of what the coordinator has read: gRPC's flow control lets some more lie on the way."""
    target = paced(0.005)
    most = 0
    async with fleet(target, max_concurrent_requests=4, max_queued_requests=0) as (client, _, service):
        results = client.generate_many(prompts(300), **SHORT)
        async for _ in results:
            most = max(most, len(service.completions.requests.list()))
            assert service.completions.admission.queued == 0
        assert most <= 4
        assert target.opened >= 300


async def test_a_slow_reader_has_no_more_computed_than_it_may_leave_unread() -> None:
    """Neither by number nor by size; and once it reads, it has everything."""
    target = FakeTarget()
    taken: list[int] = []

    async def items() -> AsyncIterator[BatchItem | BatchOutcome]:
        for number, prompt in enumerate(prompts(400, taken)):
            yield BatchItem(number, GenerationRequest(prompt, **SHORT))

    async with fleet(target, max_concurrent_requests=4) as (_, _, service):
        results = Batch(service.completions, None).outcomes(items())
        async with aclosing(results):
            seen = [(await anext(results)).index]
            await until(lambda: not service.completions.requests.list())
            await asyncio.sleep(0.2)
            # One is read, one is handed over, and those that ran went on to their ends
            assert len(taken) <= MAX_UNREAD + 4 + 2
            assert service.completions.admission.running == 0, "results hold no places"
            seen += [outcome.index async for outcome in results]
        assert sorted(seen) == [*range(400)]


async def test_large_results_count_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_UNREAD_BYTES", 1)
    taken: list[int] = []

    async def items() -> AsyncIterator[BatchItem | BatchOutcome]:
        for number, prompt in enumerate(prompts(20, taken)):
            yield BatchItem(number, GenerationRequest(prompt, **SHORT))

    async with fleet(FakeTarget(), max_concurrent_requests=1) as (_, _, service):
        results = Batch(service.completions, None).outcomes(items())
        async with aclosing(results):
            seen = [(await anext(results)).index]
            await asyncio.sleep(0.2)
            assert len(taken) <= 3
            seen += [outcome.index async for outcome in results]
    assert sorted(seen) == [*range(20)]


async def test_a_long_completion_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_PIECE_BYTES", 1)
    async with cluster(FakeTarget()) as client:
        found = await collect(
            client.generate_many([(10,), (20,)], max_tokens=30, temperature=0.0, logprobs=2)
        )
    assert [each.completed and each.completed.token_ids for _, each in sorted(found.items())] == [
        tuple(range(11, 41)),
        tuple(range(21, 51)),
    ]
    assert all(each.completed and len(each.completed.logprobs) == 30 for each in found.values())


# ---- beside other callers


@pytest.mark.parametrize("places", [1, 8])
async def test_a_batch_starves_no_single_request(places: int) -> None:
    """From the same address, without and with places that are kept for clients with few."""
    target = paced(0.01)
    answered: list[int] = []
    async with fleet(target, max_concurrent_requests=places) as (client, _, service):

        async def read() -> None:
            results = client.generate_many(prompts(400), **SHORT)
            async for result in results:
                answered.append(result.index)  # noqa: PERF401 - counted while it grows

        reading = asyncio.create_task(read())
        await until(lambda: len(answered) >= 2 * places)
        for _ in range(3):
            before = len(answered)
            assert (await client.complete((10,), **SHORT)).token_ids == expected(0)
            assert len(answered) - before <= 6 * places, "it waited for a few of the batch at most"
        assert not reading.done()
        assert service.completions.admission.queued == 0, "a batch takes no room in the queue"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not (target.running or service.completions.admission.running))


async def test_two_batches_share_the_places() -> None:
    target = paced(0.005)
    async with cluster(target, max_concurrent_requests=2) as client:

        async def read(count: int) -> int:
            return len(await collect(client.generate_many(prompts(count), **SHORT)))

        long = asyncio.create_task(read(2000))
        await asyncio.sleep(0.1)
        assert await read(10) == 10
        assert not long.done(), "ten do not wait for two thousand"
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


# ---- what fails


async def test_requests_that_fail_end_no_other() -> None:
    target = FakeTarget()
    asked: list[Any] = [
        (10,),
        (),
        (10_000,),
        GenerationRequest((12,), seed=1 << 70),
        GenerationRequest((13,), sampled_logprobs=True, row_kind=RowKind.DENSE),
        GenerationRequest("x" * (2 << 20)),
        GenerationRequest(tuple([10] * 20_000)),
        (14,),
    ]
    async with cluster(target) as client:
        found = await collect(client.generate_many(asked, **SHORT))
    errors = {index: str(each.error) for index, each in found.items() if each.error is not None}
    assert sorted(found) == [*range(len(asked))]
    assert sorted(errors) == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(found[index].error, InvalidRequestError) for index in errors)
    assert "the prompt is empty; it must hold at least one token" in errors[1]
    assert "ids must be in 0.." in errors[2]
    assert f"seed is {1 << 70}; it must be from" in errors[3]
    assert "sampled_logprobs is true and row_kind is dense" in errors[4]
    assert "bytes" in errors[5]
    assert "20000" in errors[6]
    first = found[0].completed
    last = found[7].completed
    assert first is not None
    assert last is not None
    assert (first.token_ids, last.token_ids) == ((11, 12), (15, 16))


async def test_a_target_that_fails_one_sequence_fails_one_request() -> None:
    class Picky(FakeTarget):
        async def serve_sequence(self, sequence: Any) -> None:
            if sequence.options.sampling.seed == 3:
                raise InvalidRequestError("the seed is 3; it must be another one")
            await super().serve_sequence(sequence)

    asked = [GenerationRequest((10 + seed,), seed=seed) for seed in range(8)]
    async with cluster(Picky()) as client:
        found = await collect(client.generate_many(asked, **SHORT))
    assert [index for index, each in found.items() if each.error is not None] == [3]
    assert "the seed is 3" in str(found[3].error)
    assert all(found[index].completed for index in range(8) if index != 3)


@pytest.mark.parametrize("way", ["leave", "cancel"])
async def test_whoever_leaves_cancels_what_runs(way: str) -> None:
    target = paced(0.05)
    async with fleet(target, FakeDraft(), max_concurrent_requests=8) as (client, _, service):
        results = client.generate_many(prompts(2000), max_tokens=40, temperature=0.0)

        async def read() -> None:
            async with aclosing(results):
                async for _ in results:
                    return

        reading = asyncio.create_task(read())
        await until(lambda: target.running == 8)
        if way == "cancel":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not (target.running or service.completions.requests.list()))
        assert service.completions.admission.running == 0
        assert target.opened < 40
        # and the coordinator serves on
        target.step_seconds = 0.0
        assert (await client.complete((10,), **SHORT)).token_ids == expected(0)


async def test_a_batch_has_its_time() -> None:
    async with cluster(paced(0.05), max_concurrent_requests=2) as client:
        with pytest.raises(DeadlineError):
            async for _ in client.generate_many(prompts(2000), timeout_seconds=0.5, **SHORT):
                pass


async def test_a_text_is_no_list_of_prompts() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError, match="prompts is a text; it must be a list of prompts"):
            await collect(client.generate_many("def f("))


async def test_an_error_of_the_prompts_is_the_callers() -> None:
    def failing() -> Iterator[tuple[int, ...]]:
        yield (10,)
        raise ValueError("no more paper")

    target = FakeTarget()
    async with cluster(target) as client:
        with pytest.raises(ValueError, match="no more paper"):
            await collect(client.generate_many(failing(), **SHORT))
        await until(lambda: not target.running)


async def test_so_many_batches_and_no_more() -> None:
    never = asyncio.Event()

    async def waiting() -> AsyncIterator[tuple[int, ...]]:
        await never.wait()
        yield (10,)

    async with fleet(FakeTarget()) as (client, _, service), Client(client.address, retries=NO_RETRIES) as own:
        open_ones = [asyncio.create_task(collect(own.generate_many(waiting()))) for _ in range(MAX_BATCHES)]
        await until(lambda: service.completions.admission.batches == MAX_BATCHES)
        with pytest.raises(CapacityError, match=f"{MAX_BATCHES} batches run, which is the most"):
            await collect(own.generate_many([(10,)], **SHORT))
        assert (await own.complete((10,), **SHORT)).token_ids == expected(0), "others are none of them"
        for each in open_ones:
            each.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        await until(lambda: service.completions.admission.batches == 0)


# ---- connections that break


Answer = Callable[[int, int], "generation_pb2.GenerateBatchResponse | None"]


class Scripted(GenerateOnly):
    """Answers the requests of a batch by the number of the call; ends the call where there is no answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls = 0
        self.asked: list[list[int]] = []

    def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        raise NotImplementedError

    async def GenerateBatch(  # noqa: N802
        self, requests: AsyncIterator[generation_pb2.GenerateBatchRequest], context: Context
    ) -> AsyncIterator[generation_pb2.GenerateBatchResponse]:
        self.calls += 1
        self.asked.append([])
        async for request in requests:
            self.asked[-1].append(request.index)
            answer = self.answer(self.calls, request.index)
            if answer is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator ends")
            else:
                yield answer


def completion_of(index: int) -> generation_pb2.GenerateBatchResponse:
    summary = generation_pb2.GenerationSummary(finish_reason=generation_pb2.FINISH_REASON_LENGTH)
    piece = generation_pb2.GenerateResponse(
        token_ids=[index], drafted=[False], text_lengths=[0], summary=summary
    )
    return generation_pb2.GenerateBatchResponse(index=index, piece=piece)


@asynccontextmanager
async def scripted(answer: Answer, retries: Retries) -> AsyncIterator[tuple[Client, Scripted]]:
    servicer = Scripted(answer)
    register = partial(add_GenerationServiceServicer_to_server, servicer)
    async with serving(register) as (address, _), Client(address, retries=retries) as client:
        yield client, servicer


QUICK = Retries(first_wait_seconds=0.01)


@pytest.mark.parametrize("kind", ["list", "async"])
async def test_what_a_broken_call_has_not_answered_is_sent_again(kind: str) -> None:
    """Each call answers four and breaks; every prompt is taken from its iterator once."""
    taken: list[int] = []

    async def slowly() -> AsyncIterator[tuple[int, ...]]:
        for prompt in prompts(30, taken):
            await asyncio.sleep(0.001)
            yield prompt

    answered: list[int] = []

    def answer(call: int, index: int) -> generation_pb2.GenerateBatchResponse | None:
        if len(answered) == 4 * call:
            return None
        answered.append(index)
        return completion_of(index)

    asked = prompts(30, taken) if kind == "list" else slowly()
    async with scripted(answer, QUICK) as (client, servicer):
        found = await collect(client.generate_many(asked))
    assert sorted(found) == [*range(30)]
    assert all(each.completed and each.completed.token_ids == (index,) for index, each in found.items())
    assert taken == [*range(30)]
    assert servicer.calls == 8


async def test_a_request_is_tried_again_where_that_may_help() -> None:
    def answer(call: int, index: int) -> generation_pb2.GenerateBatchResponse:
        if index == 1 and call < 3:
            return error_to_proto(index, Ending(grpc.StatusCode.UNAVAILABLE, "no target is ready"))
        if index == 2:
            return error_to_proto(index, Ending(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is wrong"))
        if index == 3:
            return error_to_proto(index, Ending(grpc.StatusCode.UNAVAILABLE, "no target is ever ready"))
        return completion_of(index)

    async with scripted(answer, QUICK) as (client, servicer):
        found = await collect(client.generate_many(prompts(5)))
    assert servicer.asked == [[0, 1, 2, 3, 4], [1, 3], [1, 3], [3]]
    assert isinstance(found[2].error, InvalidRequestError)
    assert isinstance(found[3].error, ServiceUnavailableError)
    assert all(found[index].completed for index in (0, 1, 4))


async def test_a_coordinator_that_always_breaks_the_call_is_an_error() -> None:
    async with scripted(lambda call, index: None, QUICK) as (client, servicer):
        with pytest.raises(ServiceUnavailableError, match="the coordinator ends"):
            await collect(client.generate_many(prompts(5)))
    assert servicer.calls == 4


async def test_a_result_of_nothing_that_was_asked_is_refused() -> None:
    async with scripted(lambda call, index: completion_of(77), QUICK) as (client, _):
        with pytest.raises(ProtocolError, match="it sent a result of request 77, which it does not have"):
            await collect(client.generate_many(prompts(5)))

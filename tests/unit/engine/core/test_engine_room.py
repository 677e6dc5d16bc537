"""Room in an engine: sequences wait for the cache in order, and impossible settings are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.engine.core.engine import Engine
from tandem.engine.settings import EngineSettings
from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
)
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.core.engines import _PROMPT
from tests.unit.engine.greedy import (
    GreedyHead,
    RowsHead,
    greedy,
    plain_greedy,
    running,
    settle,
)

_TOKENS_PER_GRANULE = 64


def _kv_bytes(model: TinyModel, tokens: int) -> int:
    return tokens * 4 * sum(layer.values_per_token for layer in model.loaded.layers)


async def test_when_the_cache_is_full_requests_wait_and_then_proceed(llama: TinyModel) -> None:
    expected = plain_greedy(llama.reference, _PROMPT, 6)
    room = _kv_bytes(llama, 2 * _TOKENS_PER_GRANULE)
    limits: dict[str, Any] = {"max_length": _TOKENS_PER_GRANULE, "kv_cache_bytes": room}
    async with running(llama.backends, GreedyHead(), **limits) as engine:
        first, second = await engine.open(60), await engine.open(60)
        waiting = [asyncio.create_task(greedy(engine, _PROMPT, 6)) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert (engine.usage.sequence_count, engine.usage.waiting_count) == (2, 3)
        assert engine.usage.reserved_tokens == engine.usage.total_tokens == 2 * _TOKENS_PER_GRANULE
        assert not any(task.done() for task in waiting)
        engine.release(first)
        assert await asyncio.gather(*waiting) == [expected] * 3
        engine.release(second)
        await settle(engine)


async def test_waiting_is_first_come_first_served(llama: TinyModel) -> None:
    async with running(
        llama.loaded, RowsHead(), max_length=128, kv_cache_bytes=_kv_bytes(llama, 192)
    ) as engine:
        held = await engine.open(128)
        large = asyncio.create_task(engine.open(128))
        await asyncio.sleep(0)
        small = asyncio.create_task(engine.open(10))  # would fit, but someone waits longer
        await asyncio.sleep(0.02)
        assert not large.done()
        assert not small.done()
        large.cancel()
        assert (await asyncio.wait_for(small, 5)).max_length == 10
        engine.release(held)
        engine.release(small.result())
        await settle(engine)


async def test_no_more_than_max_sequences_are_open(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead(), max_sequences=1, max_waiting=1) as engine:
        held = await engine.open(8)
        waiting = asyncio.create_task(engine.open(8))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError) as raised:
            await engine.open(8)
        assert str(raised.value) == (
            "The KV cache is full and 1 requests are waiting for room, which is the most; try later."
        )
        engine.release(held)
        engine.release(await waiting)
        await settle(engine)


async def test_a_request_that_is_cancelled_while_room_is_granted_holds_none(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead(), max_sequences=1) as engine:
        held = await engine.open(8)
        waiting = asyncio.create_task(engine.open(8))
        await asyncio.sleep(0)
        engine._admission.close(held)  # grants the room; the waiter has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await settle(engine)


@pytest.mark.parametrize("max_length", [0, -1, 193])
async def test_unserved_lengths_are_refused(llama: TinyModel, max_length: int) -> None:
    async with running(llama.backends, RowsHead()) as engine:
        with pytest.raises(InvalidRequestError) as raised:
            await engine.open(max_length)
    assert str(raised.value) == (
        f"A sequence of up to {max_length} tokens was asked for; this model serves 1 to 192."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_length": 193}, "max_length is 193, but the model {name} was made for at most 192 tokens."),
        (
            {"kv_cache_bytes": 1000},
            "The KV cache may take 1000 bytes, but one sequence of max_length 192 needs 49152; give it more memory or "
            "lower max_length.",
        ),
    ],
)
async def test_unsatisfiable_settings_are_refused(
    llama: TinyModel, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Engine(llama.loaded, RowsHead(), EngineSettings(**settings))
    assert str(raised.value) == sentence.format(name=llama.loaded.info.name)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_sequences": 0}, "max_sequences is 0 and must be at least 1."),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens is 0 and must be at least 1."),
        ({"max_waiting": -1}, "max_waiting is -1 and must not be negative."),
        ({"max_length": 0}, "max_length is 0 and must be at least 1."),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes is 0 and must be at least 1."),
        (
            {"device_memory_utilization": 1.5},
            "device_memory_utilization is 1.5 and must be above 0 and at most 1.",
        ),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        EngineSettings(**settings)
    assert str(raised.value) == sentence

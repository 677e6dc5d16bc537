"""Room in an engine: pages go to the oldest, sequences wait in order, and impossible settings are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tandem.engine.core import page_scheduler
from tandem.engine.core.engine import Engine
from tandem.engine.settings import EngineSettings
from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
)
from tandem.types import Delta
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import (
    GreedyHead,
    RowsHead,
    greedy_together,
    plain_greedy,
    plain_logits,
    rows,
    running,
    settle,
)

_PAGE_TOKENS = 64


def _kv_bytes(model: TinyModel, tokens: int) -> int:
    return tokens * 4 * sum(layer.values_per_token for layer in model.loaded.layers)


async def test_a_sequence_holds_pages_for_its_tokens_not_for_its_length(llama: TinyModel) -> None:
    room = _kv_bytes(llama, 4 * _PAGE_TOKENS)
    async with running(llama.backends, RowsHead(), kv_cache_bytes=room) as engine:
        sequences = [await engine.open(192) for _ in range(4)]
        for number, sequence in enumerate(sequences):
            await rows(engine, sequence, Delta(0, [number + 3] * 40), 1)
        assert engine.usage.reserved_tokens == engine.usage.total_tokens == 4 * _PAGE_TOKENS
        for sequence in sequences:
            engine.release(sequence)
        await settle(engine)


@pytest.mark.parametrize("prefix_reuse", [True, False])
async def test_the_youngest_gives_its_pages_up_and_computes_again(
    llama: TinyModel, prefix_reuse: bool
) -> None:
    prompts = [[(13 * number + step) % 90 + 3 for step in range(60)] for number in range(5)]
    expected = [plain_greedy(llama.reference, prompt, 80) for prompt in prompts]
    limits: dict[str, Any] = {"max_length": 140, "kv_cache_bytes": _kv_bytes(llama, 6 * _PAGE_TOKENS)}
    async with running(llama.backends, GreedyHead(), prefix_reuse=prefix_reuse, **limits) as engine:
        assert await greedy_together(engine, prompts, 80) == expected
        assert engine.usage.preemption_count > 0, "five of them need fifteen pages, and there are six"
        await settle(engine)


async def test_pages_of_idle_sequences_go_to_those_that_could_not_run(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_scheduler, "IDLE_SECONDS", 0.02)
    room = _kv_bytes(llama, 3 * _PAGE_TOKENS)
    async with running(llama.backends, RowsHead(), kv_cache_bytes=room, prefix_reuse=False) as engine:
        idle, busy = await engine.open(192), await engine.open(192)
        tokens = [7] * 150
        await rows(engine, idle, Delta(0, tokens), 1)
        last = await asyncio.wait_for(rows(engine, busy, Delta(0, [8] * 100), 1), 10)
        assert torch.allclose(last, plain_logits(llama.reference, [8] * 100)[-1:], atol=1e-4)
        assert idle.computed_length == 0
        again = await rows(engine, idle, Delta(150, [9]), 1)
        assert torch.allclose(again, plain_logits(llama.reference, [*tokens, 9])[-1:], atol=1e-4)


async def test_waiting_is_first_come_first_served(llama: TinyModel) -> None:
    async with running(llama.loaded, RowsHead(), max_sequences=1) as engine:
        held = await engine.open(128)
        first = asyncio.create_task(engine.open(128))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.open(10))
        await asyncio.sleep(0.02)
        assert (engine.usage.sequence_count, engine.usage.waiting_count) == (1, 2)
        first.cancel()
        engine.release(held)
        assert (await asyncio.wait_for(second, 5)).max_length == 10
        assert not first.done() or first.cancelled()
        engine.release(second.result())
        await settle(engine)


async def test_no_more_than_max_sequences_are_open(llama: TinyModel) -> None:
    async with running(llama.backends, RowsHead(), max_sequences=1, max_waiting=1) as engine:
        held = await engine.open(8)
        waiting = asyncio.create_task(engine.open(8))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError) as raised:
            await engine.open(8)
        assert str(raised.value) == (
            "1 sequences are open and 1 requests are waiting, which is the most; try later."
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

"""A computed prefix is reused, and sequences that reuse it produce the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Job, StepRecord
from tandem.engine.core.selection import Backends
from tandem.engine.settings import EngineSettings
from tandem.types import Delta
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import Generation, GreedyHead, greedy, greedy_together, plain_greedy, settle

_PREFIX = [(11 * step) % 90 + 3 for step in range(100)]


class _Counting:
    """Counts the tokens that the model sees."""

    def __init__(self) -> None:
        self.token_count = 0

    def __call__(self, record: StepRecord) -> None:
        self.token_count += record.token_count

    def take(self) -> int:
        """The count since the last call."""
        count, self.token_count = self.token_count, 0
        return count


def _engine(model: TinyModel, count: _Counting, **settings: Any) -> Engine[Any, Any]:
    engine: Engine[Any, Any] = Engine(
        Backends(model.loaded), GreedyHead(), EngineSettings(**settings), on_step=count
    )
    engine.start()
    return engine


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "deepseek_v3", "falcon"])
async def test_a_reused_prefix_is_not_computed_again(
    family: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model, count = tiny_model(family), _Counting()
    engine = _engine(model, count)
    prompts = [[*_PREFIX, 50], [*_PREFIX, 51], [*_PREFIX[:60], 52], [*_PREFIX, 50]]
    costs = []
    for prompt in prompts:
        assert await greedy(engine, prompt, 8) == plain_greedy(model.reference, prompt, 8)
        await settle(engine)
        costs.append(count.take())
    assert costs == [101 + 7, 1 + 7, 1 + 7, 1 + 7]
    await engine.close()


async def test_open_sequences_share_as_well(llama: TinyModel) -> None:
    count = _Counting()
    engine = _engine(llama, count)
    sequence = await engine.open(192)
    await engine.submit(Job(sequence, Delta(0, _PREFIX), 0, Generation(1)))
    prompts = [[*_PREFIX, 60 + index] for index in range(8)]
    count.take()
    texts = await greedy_together(engine, prompts, 5)
    assert texts == [plain_greedy(llama.reference, prompt, 5) for prompt in prompts]
    assert count.take() == 8 * (1 + 4)
    engine.release(sequence)
    await engine.close()


async def test_kept_prefixes_make_room_least_recently_used_first(llama: TinyModel) -> None:
    count = _Counting()
    bytes_per_token = 4 * sum(layer.values_per_token for layer in llama.loaded.layers)
    engine = _engine(llama, count, max_length=128, kv_cache_bytes=2 * 128 * bytes_per_token)
    first, second, third = ([id_] * 80 for id_ in (5, 6, 7))
    costs = []
    for prompt in (first, second, first, third, first, second):
        assert await greedy(engine, prompt, 1) == plain_greedy(llama.reference, prompt, 1)
        await settle(engine)
        assert engine.usage.retained_tokens <= 256
        costs.append(count.take())
    assert costs == [80, 80, 1, 80, 1, 80], "the third took the second's place, not the first's"
    await engine.close()


async def test_no_prefix_is_kept_if_that_is_switched_off(llama: TinyModel) -> None:
    count = _Counting()
    engine = _engine(llama, count, prefix_reuse=False)
    for _ in range(2):
        await greedy(engine, _PREFIX, 1)
        await settle(engine)
        assert (count.take(), engine.usage.retained_tokens) == (100, 0)
    await engine.close()


async def test_a_job_without_rows_whose_tokens_are_all_known_ends(llama: TinyModel) -> None:
    count = _Counting()
    engine = _engine(llama, count)
    sequences = [await engine.open(192) for _ in range(2)]
    for sequence in sequences:
        assert await engine.submit(Job(sequence, Delta(0, _PREFIX), 0, Generation(1))) is None
    assert count.take() == 100 + 1
    for sequence in sequences:
        engine.release(sequence)
    await engine.close()

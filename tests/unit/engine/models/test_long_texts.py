"""Texts many times as long as a window: what a layer does not see any more is given back, and the text is the same."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.engine.kv_cache.arena import group_layers
from tandem.types import Delta
from tests.unit.engine.backends.branch_jobs import Branches, poison, run_together
from tests.unit.engine.conftest import MakeModel, TinyModel, saved_model
from tests.unit.engine.greedy import (
    GreedyHead,
    RowsHead,
    greedy,
    greedy_together,
    plain_greedy,
    plain_logits,
    rows,
    running,
    settle,
)
from tests.unit.engine.tiny_models import CONFIGS, VOCABULARY_SIZE, WINDOW

_LENGTH = 640
_PAGE_TOKENS = 64
_MAX_PAGES = 5
"""Of a sequence in a group with a window: the window, what a rollback reaches and a chunk of 64 tokens."""
_TOKEN_COUNT = 5


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a model of long texts, once."""
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            config = CONFIGS[family]()
            config.max_position_embeddings = _LENGTH
            made[family] = saved_model(tmp_path_factory.mktemp(family), config)
        return made[family]

    return make


def _prompts(*lengths: int) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def _page_bytes(model: TinyModel) -> int:
    """Bytes of a page in one group of layers."""
    layers = model.loaded.layers
    return _PAGE_TOKENS * 4 * layers[0].values_per_token * max(len(g.layers) for g in group_layers(layers))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss", "qwen2"])
async def test_long_texts_are_those_of_transformers(family: str, long_model: MakeModel) -> None:
    model = long_model(family)
    prompts = _prompts(400, 500, *[80 + 11 * number for number in range(14)])
    expected = [plain_greedy(model.reference, prompt, _TOKEN_COUNT) for prompt in prompts[:2]]
    windows = [group.window for group in group_layers(model.loaded.layers)]
    assert set(windows) - {None} == {WINDOW}
    # Room for two of the longest, as long as windows are given back.
    pages = sum(_MAX_PAGES if window else -(-_LENGTH // _PAGE_TOKENS) for window in windows)
    room = 2 * pages * _page_bytes(model)
    async with running(model.backends, GreedyHead(), kv_cache_bytes=room, prefill_chunk_tokens=64) as engine:
        alone = [await greedy(engine, prompt, _TOKEN_COUNT) for prompt in prompts[:2]]
        await settle(engine)
        again = await greedy(engine, prompts[0], _TOKEN_COUNT)
        assert engine.usage.preemption_count == 0
        together = await greedy_together(engine, prompts, _TOKEN_COUNT)
        assert engine.usage.preemption_count > 0, "sixteen need more than there is"
        assert together[:2] == alone == expected
        assert again == expected[0]


@pytest.mark.parametrize(
    ("family", "with_kernels"), [("mistral", True), ("gemma2", True), ("gemma2", False), ("gpt_oss", False)]
)
async def test_branches_see_what_their_windows_reach(
    family: str, with_kernels: bool, long_model: MakeModel
) -> None:
    model = long_model(family)
    (text,) = _prompts(500)
    async with running(model.with_plans if with_kernels else model.loaded, RowsHead()) as engine:
        if with_kernels:
            await engine.warm_up()
        poison(engine)
        sequence = await engine.open(_LENGTH, 64)
        await rows(engine, sequence, Delta(0, text[:-3]), 1)
        assert sequence.tables[-1].first > 0
        lengths = [497, 498, 498, 500, 499]
        job = Branches(sequence, Delta(497, text[497:]), leaves_after=lengths)
        await run_together(engine, job)
        job.check_branches(model.reference, text)
        engine.release(sequence)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
async def test_rollbacks_within_and_beyond_what_is_kept(family: str, long_model: MakeModel) -> None:
    """A proposal that is rejected costs nothing; what goes further back is computed again."""
    model = long_model(family)
    (text,) = _prompts(500)
    async with running(model.backends, RowsHead(), prefill_chunk_tokens=64) as engine:
        sequence = await engine.open(_LENGTH)
        await rows(engine, sequence, Delta(0, text), 1)
        assert sequence.tables[-1].first > 0
        for base, row_count in ((495, 5), (400, 1), (404, 404), (120, 3)):
            text = [*text[:base], 7, 8, 9, 10]
            found = await rows(engine, sequence, Delta(base, [7, 8, 9, 10]), row_count)
            assert torch.allclose(found, plain_logits(model.reference, text)[-row_count:], atol=2e-3), base
        engine.release(sequence)

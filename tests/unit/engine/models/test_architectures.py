"""The engine says what transformers says, whatever the architecture, the length and whoever else is in the batch."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.kv_cache.arena import bytes_of_page, group_layers
from tandem.engine.models.loading import load_model
from tandem.model.types import Delta
from tests.paths import DEVICE
from tests.unit.engine.backends.test_branches import Branches, poisoned, run_together
from tests.unit.engine.conftest import MakeModel, TinyModel, saved_model
from tests.unit.engine.greedy import (
    GreedyHead,
    RowsHead,
    greedy,
    greedy_together,
    most_probable,
    plain_greedy,
    plain_logits,
    rows,
    running,
    settle,
)
from tests.unit.engine.tiny_models import CONFIGS, VOCABULARY_SIZE, WINDOW, hf, save_checkpoint

_TOKEN_COUNT = 7
_PAGE_TOKENS = 64
_UNPACKED = {"falcon", "falcon_alibi", "gptj", "bloom"}
_WINDOWED = {"mistral", "qwen2", "mixtral", "gemma2", "gemma3", "phi3", "starcoder2", "gpt_oss", "phimoe"}


def _prompts(count: int) -> list[list[int]]:
    """Different lengths, one token to several windows."""
    generator = random.Random(7)
    lengths = [1, 2, 50, *(generator.randrange(3, 60) for _ in range(count - 3))]
    return [[generator.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest, tiny_model: MakeModel) -> TinyModel:
    return tiny_model(request.param)


async def test_greedy_text_is_that_of_transformers(model: TinyModel) -> None:
    prompts = _prompts(16)[:8]
    checked = prompts[:4]
    async with running(model.backends, GreedyHead(), prefix_reuse=False) as engine:
        alone = [await greedy(engine, prompt, _TOKEN_COUNT) for prompt in checked[1:3]]
        texts = (await greedy_together(engine, prompts, _TOKEN_COUNT))[:4]
    async with running(model.backends, GreedyHead(), prefix_reuse=False, prefill_chunk_tokens=7) as engine:
        in_chunks = await greedy_together(engine, checked, _TOKEN_COUNT)
    assert texts == [most_probable(model.reference, *both) for both in zip(checked, texts, strict=True)]
    assert len({token_id for text in texts for token_id in text}) > 8, "the model always says the same"
    assert alone == texts[1:3]
    assert in_chunks == texts


async def test_greedy_text_survives_rejected_proposals_and_repeated_messages(model: TinyModel) -> None:
    prompt = _prompts(4)[-1]
    expected = plain_greedy(model.reference, prompt, 5)
    token_ids = list(prompt)
    async with running(model.backends, RowsHead()) as engine:
        sequence = await engine.open(len(prompt) + 32)
        delta = Delta(0, prompt)
        for token_id in expected:
            proposal = [token_id, 3, 4, 5]  # the first is right, the others are what a bad draft would say
            sent = Delta(delta.base_length, [*delta.token_ids, *proposal])
            verified, repeated = [await rows(engine, sequence, sent, 5) for _ in range(2)]
            assert torch.allclose(verified, repeated, atol=1e-4)
            assert int(verified[0].argmax()) == token_id
            token_ids.append(token_id)
            delta = Delta(len(token_ids) - 1, [token_id])
        everything = await rows(engine, sequence, Delta(len(token_ids), []), len(token_ids))
    assert torch.allclose(everything, plain_logits(model.reference, token_ids), atol=2e-3)


@pytest.mark.parametrize(
    ("model", "attention"),
    [*((family, "torch") for family in sorted(CONFIGS)), ("llama", "kernels"), ("gemma3", "kernels")],
    indirect=["model"],
)
async def test_greedy_text_survives_preemption_and_shared_prefixes(model: TinyModel, attention: str) -> None:
    """The other tests of all architectures run them by the kernels."""
    generator = random.Random(3)
    common = [generator.randrange(3, VOCABULARY_SIZE) for _ in range(_PAGE_TOKENS)]
    prompts = [[*common, *prompt] for prompt in _prompts(6)]
    layers = model.loaded.layers
    groups = len(group_layers(layers))
    # The longest request needs two pages in each group; six with a common page need seven.
    room = 4 * groups * bytes_of_page(layers, torch.float32)
    backends = model.backends if attention == "kernels" else model.loaded
    limits: dict[str, Any] = {
        "max_length": 2 * _PAGE_TOKENS,
        "kv_cache_bytes": room,
        "prefill_chunk_tokens": _PAGE_TOKENS,
    }
    async with running(backends, GreedyHead(), **limits) as engine:
        first = await greedy(engine, prompts[0], _TOKEN_COUNT)
        await settle(engine)
        assert engine.usage.retained_tokens >= _PAGE_TOKENS, "what the others begin with"
        together = await greedy_together(engine, prompts, _TOKEN_COUNT)
        assert engine.usage.preemption_count > 0
        await settle(engine)
    assert first == together[0]
    for index in (0, 2, 5):
        assert together[index] == most_probable(model.reference, prompts[index], together[index])


def test_sequences_share_a_forward_pass_wherever_attention_can_be_replaced(tiny_model: MakeModel) -> None:
    assert {family for family in CONFIGS if not tiny_model(family).loaded.is_packed} == _UNPACKED


def test_windows_are_found_in_the_model_itself(tiny_model: MakeModel) -> None:
    windows = {
        family: {layer.window for layer in tiny_model(family).loaded.layers} - {None} for family in CONFIGS
    }
    assert windows == {family: {WINDOW} if family in _WINDOWED else set() for family in CONFIGS}


_ORIGINAL = 32
_LONG = [5 + step % 80 for step in range(60)]


def _config() -> Any:
    rope = {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": _ORIGINAL,
    }  # fmt: skip
    return hf.Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, original_max_position_embeddings=_ORIGINAL, initializer_range=0.3,
        pad_token_id=0, rope_parameters=rope,
    )  # fmt: skip


async def test_a_long_stranger_does_not_change_a_short_text(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _config())
    async with running(
        load_model(tmp_path, device=DEVICE, dtype="float32"), RowsHead(), prefix_reuse=False
    ) as engine:
        short = await engine.open(64)
        long = await engine.open(64)
        alone = await rows(engine, short, Delta(0, _LONG[:9]), 9)
        beside, _ = await asyncio.gather(
            rows(engine, short, Delta(0, _LONG[:9]), 9), rows(engine, long, Delta(0, _LONG), 60)
        )
        after = await rows(engine, short, Delta(0, _LONG[:9]), 9)
    assert torch.allclose(alone, beside, atol=1e-4)
    assert torch.allclose(alone, after, atol=1e-4)


@pytest.mark.parametrize(("max_length", "length"), [(_ORIGINAL, 20), (128, 60)])
async def test_frequencies_are_those_of_the_longest_text(
    tmp_path: Path, max_length: int, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save_checkpoint(tmp_path, _config())
    async with running(
        load_model(tmp_path, device=DEVICE, dtype="float32"), RowsHead(), max_length=max_length
    ) as engine:
        sequence = await engine.open(max_length)
        result = await rows(engine, sequence, Delta(0, _LONG[:length]), length)
    assert torch.allclose(result, plain_logits(reference, _LONG[:length]), atol=1e-3)
    assert ("rotary frequencies are fixed" in caplog.text) == (max_length > _ORIGINAL)


_LENGTH = 640
_MAX_PAGES = 5
"""Of a sequence in a group with a window: the window, what a rollback reaches and a chunk of 64 tokens."""
_FEW_TOKENS = 5


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a model of long texts, once."""

    @cache
    def make(family: str) -> TinyModel:
        config = CONFIGS[family]()
        config.max_position_embeddings = _LENGTH
        return saved_model(tmp_path_factory.mktemp(family), config)

    return make


def _long_prompts(*lengths: int) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def _page_bytes(model: TinyModel) -> int:
    """Bytes of a page in one group of layers."""
    layers = model.loaded.layers
    return _PAGE_TOKENS * 4 * layers[0].values_per_token * max(len(g.layers) for g in group_layers(layers))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss", "qwen2"])
async def test_long_texts_are_those_of_transformers(family: str, long_model: MakeModel) -> None:
    model = long_model(family)
    prompts = _long_prompts(400, 500, *[80 + 11 * number for number in range(14)])
    expected = [plain_greedy(model.reference, prompt, _FEW_TOKENS) for prompt in prompts[:2]]
    windows = [group.window for group in group_layers(model.loaded.layers)]
    assert set(windows) - {None} == {WINDOW}
    # Room for two of the longest, as long as windows are given back.
    pages = sum(_MAX_PAGES if window else -(-_LENGTH // _PAGE_TOKENS) for window in windows)
    room = 2 * pages * _page_bytes(model)
    async with running(model.backends, GreedyHead(), kv_cache_bytes=room, prefill_chunk_tokens=64) as engine:
        alone = [await greedy(engine, prompt, _FEW_TOKENS) for prompt in prompts[:2]]
        await settle(engine)
        again = await greedy(engine, prompts[0], _FEW_TOKENS)
        assert engine.usage.preemption_count == 0
        together = await greedy_together(engine, prompts, _FEW_TOKENS)
        assert engine.usage.preemption_count > 0, "sixteen need more than there is"
        assert together[:2] == alone == expected
        assert again == expected[0]


@pytest.mark.parametrize(
    ("family", "with_kernels"), [("mistral", False), ("gemma2", True), ("gpt_oss", False)]
)
async def test_branches_see_what_their_windows_reach(
    family: str, with_kernels: bool, long_model: MakeModel
) -> None:
    model = long_model(family)
    (text,) = _long_prompts(500)
    async with poisoned(model, with_kernels=with_kernels) as engine:
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
    (text,) = _long_prompts(500)
    async with running(model.backends, RowsHead(), prefill_chunk_tokens=64) as engine:
        sequence = await engine.open(_LENGTH)
        await rows(engine, sequence, Delta(0, text), 1)
        assert sequence.tables[-1].first > 0
        for base, row_count in ((495, 5), (400, 1), (404, 404), (120, 3)):
            text = [*text[:base], 7, 8, 9, 10]
            found = await rows(engine, sequence, Delta(base, [7, 8, 9, 10]), row_count)
            assert torch.allclose(found, plain_logits(model.reference, text)[-row_count:], atol=2e-3), base
        engine.release(sequence)

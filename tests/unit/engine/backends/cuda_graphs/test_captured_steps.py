"""Captured steps agree with eager ones. The capture here runs them eagerly, which tests everything but CUDA."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.buckets import Bucket, make_buckets, smallest
from tandem.engine.backends.cuda_graphs.capture import Work, without_capture
from tandem.engine.backends.cuda_graphs.captured_steps import CapturedSteps, GraphContext
from tandem.engine.backends.selection import Backends
from tandem.engine.backends.trial import Reference
from tandem.engine.core.engine import Engine
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.settings import EngineSettings
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import GreedyHead, greedy_together, plain_greedy

WIDTHS = (1, 4)
PROMPTS = [[5, 9, 2], [7, 7, 1, 30], [12], [3] * 9]


class Counting:
    """A capture that counts replays."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.captured += 1

        def replay() -> Tensor:
            self.replayed += 1
            return work()

        return replay


@asynccontextmanager
async def capturing(tiny: TinyModel, capture: Any, **settings: Any) -> AsyncIterator[Engine[Any, Any]]:
    engine = Engine(
        tiny.loaded,
        GreedyHead(),
        EngineSettings(max_length=64, max_sequences=4, captured_widths=WIDTHS, **settings),
        backends=replace(tiny.backends, capture=capture),
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "deepseek_v3", "qwen3_moe"]
)
async def test_captured_steps_agree_with_transformers(
    family: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    tiny, capture = tiny_model(family), Counting()
    async with capturing(tiny, capture, prefix_reuse=False) as engine:
        made = capture.replayed
        texts = await greedy_together(engine, PROMPTS, 24)
    assert capture.replayed > made + 20, "most steps are captured ones"
    assert texts == [plain_greedy(tiny.reference, prompt, 24) for prompt in PROMPTS]


async def test_work_without_a_bucket_runs_eagerly(llama: TinyModel) -> None:
    capture = Counting()
    async with capturing(llama, capture) as engine:
        made = capture.replayed
        (text,) = await greedy_together(engine, [list(range(1, 40))], 1)
    assert capture.replayed == made
    assert text == plain_greedy(llama.reference, list(range(1, 40)), 1)


async def test_a_capture_with_wrong_results_is_not_used(
    llama: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    def forget(work: Work) -> Work:
        stale = work().clone()
        return lambda: stale

    async with capturing(llama, forget) as engine:
        texts = await greedy_together(engine, PROMPTS, 12)
    assert texts == [plain_greedy(llama.reference, prompt, 12) for prompt in PROMPTS]
    assert "could not be captured" in caplog.text


async def test_uncapturable_steps_run_eagerly(llama: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    async with capturing(llama, refuse) as engine:
        (text,) = await greedy_together(engine, PROMPTS[:1], 12)
    assert text == plain_greedy(llama.reference, PROMPTS[0], 12)
    assert "could not be captured" in caplog.text


def test_all_buckets_of_a_model_pass_the_comparison(llama: TinyModel) -> None:
    model = llama.loaded
    arena = KvArena(model.layers, 256, model.dtype, model.device)
    buckets = make_buckets(4, 64, WIDTHS)
    context = GraphContext(model, arena, Reference(model), buckets, without_capture)
    assert len(CapturedSteps(context)) == len(buckets)
    assert all(not storage.any() for layer in arena.layers for storage in (layer.keys[:, :, :256],))


def test_buckets_grow_fourfold_up_to_the_limits() -> None:
    buckets = make_buckets(max_sequences=6, max_length=3000, widths=(2, 1))
    assert sorted({bucket.sequences for bucket in buckets}) == [1, 4, 6]
    assert sorted({bucket.length for bucket in buckets}) == [512, 2048, 3000]
    assert list(buckets) == sorted(buckets)


def test_the_smallest_bucket_that_holds_the_work_is_taken() -> None:
    buckets = make_buckets(max_sequences=16, max_length=4096, widths=(1, 5))
    assert smallest(buckets, 1, 1, 512) == Bucket(1, 1, 512)
    assert smallest(buckets, 2, 3, 513) == Bucket(4, 5, 2048)
    assert smallest(buckets, 17, 1, 1) is None
    assert smallest(buckets, 1, 6, 1) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: only the capture itself is not shown")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_cuda_graphs_agree_with_transformers(family: str, tmp_path_factory: Any) -> None:
    from tandem.engine.backends.cuda_graphs.capture import cuda_graph_capture
    from tandem.engine.models.loading import load_model
    from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint

    folder = tmp_path_factory.mktemp(family)
    reference = save_checkpoint(folder, CONFIGS[family]())
    loaded = load_model(folder, device="cuda", dtype="float32")
    tiny = TinyModel(folder, reference, Backends(loaded))
    async with capturing(tiny, cuda_graph_capture(loaded.device)) as engine:
        texts = await greedy_together(engine, PROMPTS, 24)
    assert texts == [plain_greedy(reference, prompt, 24) for prompt in PROMPTS]

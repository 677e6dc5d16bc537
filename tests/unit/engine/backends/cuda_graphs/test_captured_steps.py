"""Captured steps agree with eager ones. The capture here runs them eagerly, which tests everything but CUDA."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.buckets import Bucket, make_buckets, smallest
from tandem.engine.backends.cuda_graphs.capture import Work, without_capture
from tandem.engine.backends.cuda_graphs.captured_steps import CapturedSteps, GraphContext, trial_lengths
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.paged import attention, plain
from tandem.engine.backends.selection import Backends
from tandem.engine.backends.trial import Reference
from tandem.engine.core.engine import Engine
from tandem.engine.kv_cache import arena as arenas
from tandem.engine.kv_cache.arena import KvArena, LayerGeometry, pages_for
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.settings import EngineSettings
from tests.unit.engine.backends.by_hand import ByHand, naive_varlen_for, some_tokens
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


def context_of(
    by_hand: ByHand, capture: Any = without_capture, widths: tuple[int, ...] = WIDTHS
) -> GraphContext:
    model = by_hand.model
    return GraphContext(model, by_hand.arena, Reference(model), make_buckets(4, widths), capture, 192)


def test_all_buckets_of_a_model_pass_the_comparison(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    by_hand = ByHand(tmp_path, "llama")
    with caplog.at_level(logging.INFO):
        steps = CapturedSteps(context_of(by_hand))
    assert len(steps) == len(steps.outcomes) == 4
    assert all(outcome.reason is None for outcome in steps.outcomes)
    (record,) = [vars(record) for record in caplog.records if record.getMessage() == "steps captured"]
    assert record["captured"] == ["1 x 1", "1 x 4", "4 x 1", "4 x 4"]
    assert all(not layer.keys[: by_hand.arena.page_count].any() for layer in by_hand.arena.layers)


class _Choosy:
    """Captures every work but those of some turns."""

    def __init__(self, *refused: int) -> None:
        self.turn = 0
        self.refused = refused

    def __call__(self, work: Work) -> Work:
        self.turn += 1
        if self.turn in self.refused:
            raise RuntimeError("out of memory")
        return work


def test_a_size_that_cannot_be_captured_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = ByHand(tmp_path, "llama")
    with caplog.at_level(logging.INFO):
        steps = CapturedSteps(context_of(by_hand, _Choosy(1, 3)))
    reasons = {outcome.shape: outcome.reason for outcome in steps.outcomes}
    failure = "RuntimeError: out of memory"
    assert reasons == {"1 x 1": None, "1 x 4": failure, "4 x 1": None, "4 x 4": failure}
    (record,) = [vars(record) for record in caplog.records if "could not be captured" in record.getMessage()]
    assert record["captured"] == ["1 x 1", "4 x 1"]
    assert record["not_captured"] == {"1 x 4": failure, "4 x 4": failure}


STEPS = [
    [some_tokens(4), some_tokens(3, 1), some_tokens(1, 2)],
    [[], some_tokens(1, 1), []],
    [some_tokens(1, 4), some_tokens(4, 5), some_tokens(2, 6)],
    [some_tokens(1, 7), some_tokens(1, 8), some_tokens(1, 9)],
]
"""Each pads the bucket: by a fourth sequence, by short ones, or by both."""


@pytest.mark.parametrize("with_varlen", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_nothing_that_padding_writes_or_reads_reaches_a_sequence(
    family: str, with_varlen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all pages, the spare one too: it stays there, and a real row is what it would be alone."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(plain, "MAX_PART_BYTES", 1)  # a page of each sequence at a time
    if with_varlen:
        monkeypatch.setattr(attention, "varlen_for", naive_varlen_for(calls))
        monkeypatch.setattr(arenas, "stored_value_dim", lambda layer, *_: layer.key_dim)
    by_hand = ByHand(tmp_path, family)
    steps = CapturedSteps(context_of(by_hand))
    by_hand.poison()
    # The first sequence has a past that crosses pages.
    by_hand.step(eager_backend(by_hand.model, by_hand.arena), [some_tokens(100)])
    calls.clear()
    by_hand.check(steps, STEPS)
    has_varlen = with_varlen and family not in ("gemma2", "gpt_oss")
    assert len(calls) == (len(by_hand.model.layers) * len(STEPS) if has_varlen else 0)


def test_padding_computes_numbers(tmp_path: Path) -> None:
    """NaN of one padded row must not be the input of another: some layers mix the rows of a batch."""
    by_hand = ByHand(tmp_path, "llama")
    step = CapturedSteps(context_of(by_hand, widths=(4,)))._steps[-1]
    by_hand.poison()
    sequence = by_hand.sequences[0]
    sequence.token_ids = [5, 6]
    inputs = step._inputs
    with torch.inference_mode():
        inputs.fill([Segment(sequence, 2)], [], by_hand.arena.spare_page)
        logits = step._step.logits(inputs.token_ids, inputs.page_tables, inputs.starts, inputs.widths)
    assert logits.isfinite().all()


@pytest.mark.parametrize("page_count", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("tokens_ahead", [0, 7, 60])
def test_a_trial_fits_the_arena_and_is_as_long_as_that_allows(page_count: int, tokens_ahead: int) -> None:
    arena = KvArena([LayerGeometry(1, 4, 4)], page_count, torch.float32, torch.device("cpu"))
    size, max_length = arena.page_tokens, min(page_count, 30) * arena.page_tokens
    lengths = trial_lengths(Bucket(4, 4), arena, max_length, tokens_ahead)
    assert {width for _, width in lengths} == {4}
    ends = [past + width + tokens_ahead for past, width in lengths]
    needed = sum(pages_for(end, size) for end in ends)
    assert needed <= page_count
    assert max(ends) == max_length or needed == page_count, "nothing longer fits"


def test_numbers_of_sequences_grow_fourfold_up_to_the_limit() -> None:
    buckets = make_buckets(max_sequences=6, widths=(2, 1))
    assert [(bucket.sequences, bucket.width) for bucket in buckets] == [
        (1, 1), (1, 2), (4, 1), (4, 2), (6, 1), (6, 2),
    ]  # fmt: skip


def test_the_smallest_bucket_that_holds_the_work_is_taken() -> None:
    buckets = make_buckets(max_sequences=16, widths=(1, 5))
    assert smallest(buckets, 1, 1) == Bucket(1, 1)
    assert smallest(buckets, 2, 3) == Bucket(4, 5)
    assert smallest(buckets, 17, 1) is None
    assert smallest(buckets, 1, 6) is None


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

"""The KV cache gets what the largest step and the graphs leave of the device, by a meter that a test plays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.backends.cuda_graphs.buckets import make_buckets
from tandem.engine.backends.cuda_graphs.capture import without_capture
from tandem.engine.backends.memory_profile import MemoryPlan, plan_memory
from tandem.engine.core.engine import Engine
from tandem.engine.kv_cache.arena import bytes_of_page, group_layers
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import GreedyHead, greedy_together, plain_greedy

MIB = 1 << 20
WEIGHTS = 100 * MIB
SETTINGS = EngineSettings(max_length=128, max_sequences=4, prefill_chunk_tokens=48, captured_widths=(1, 3))


class FakeMeter:
    """A device whose figures are given."""

    def __init__(self, allowed: int, *peaks: int) -> None:
        self.allowed = allowed
        self.peaks = list(peaks)
        self.begun = 0
        self.shares: list[float | None] = []

    def allowance(self, share: float | None) -> int:
        self.shares.append(share)
        return self.allowed

    def begin(self) -> None:
        self.begun += 1

    def held_bytes(self) -> int:
        return WEIGHTS

    def peak_bytes(self) -> int:
        return WEIGHTS + self.peaks.pop(0)


@contextmanager
def recorded_steps(module: Any) -> Iterator[list[int]]:
    """The number of tokens of each forward pass."""
    found: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, named: found.append(named["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield found
    finally:
        hook.remove()


def test_the_largest_steps_are_run_and_the_rest_is_the_caches(
    llama: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    meter = FakeMeter(900 * MIB, 30 * MIB, 7 * MIB)
    buckets = make_buckets(4, (1, 3))
    with caplog.at_level(logging.INFO), recorded_steps(llama.loaded.module) as steps:
        plan = plan_memory(
            llama.loaded, replace(SETTINGS, device_memory_utilization=0.8), 128, buckets, meter
        )
    assert steps == [48 + 3 * 3, 4 * 3], "a chunk of a prompt beside three verifications; the largest graph"
    assert meter.shares == [0.8]
    graphs = 7 * MIB + 4 * 16 * MIB
    assert plan.graph_bytes == graphs
    assert plan.settings.kv_cache_bytes == 900 * MIB - 30 * MIB - graphs
    (record,) = [vars(record) for record in caplog.records if record.getMessage() == "memory planned"]
    found = {name: record[name] for name in record if name.endswith("_bytes")}
    assert found == {
        "weight_bytes": WEIGHTS,
        "activation_bytes": 30 * MIB,
        "graph_bytes": graphs,
        "kv_cache_bytes": plan.settings.kv_cache_bytes,
    }


def test_without_graphs_nothing_is_left_for_them(llama: TinyModel) -> None:
    plan = plan_memory(llama.loaded, SETTINGS, 128, (), FakeMeter(900 * MIB, 30 * MIB))
    assert (plan.graph_bytes, plan.settings.kv_cache_bytes) == (0, 870 * MIB)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon_alibi"])
async def test_an_engine_allocates_what_the_plan_leaves(family: str, tiny_model: Any) -> None:
    tiny = tiny_model(family)
    page_bytes = bytes_of_page(tiny.loaded.layers, torch.float32, torch.device("cpu"))
    pages = 5 * len(group_layers(tiny.loaded.layers))
    graphs = 4 * 16 * MIB if tiny.loaded.is_packed else 0
    meter = FakeMeter(30 * MIB + graphs + pages * page_bytes + page_bytes // 2, 30 * MIB, 0)
    engine: Engine[Any, Any] = Engine(
        tiny.loaded,
        GreedyHead(),
        SETTINGS,
        backends=replace(tiny.backends, capture=without_capture),
        meter=meter,
    )
    assert engine.usage.total_tokens == 5 * 64
    engine.start()
    try:
        texts = await greedy_together(engine, [[5, 9, 2], [12]], 8)
    finally:
        await engine.close()
    assert texts == [plain_greedy(tiny.reference, prompt, 8) for prompt in ([5, 9, 2], [12])]


def test_too_little_memory_is_refused(llama: TinyModel) -> None:
    with pytest.raises(ConfigurationError, match="one sequence of max_length 128 needs"):
        Engine(llama.loaded, GreedyHead(), SETTINGS, meter=FakeMeter(20 * MIB, 30 * MIB))


def test_a_step_that_does_not_fit_is_refused_in_one_sentence(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(llama.loaded.module, "forward", fails)
    with pytest.raises(ConfigurationError) as refusal:
        plan_memory(llama.loaded, SETTINGS, 128, (), FakeMeter(900 * MIB))
    assert str(refusal.value) == (
        "A step of 48 prompt tokens beside 4 sequences does not fit into the device's memory together with the "
        "weights; lower max_num_batched_tokens or max_sequences."
    )


def test_a_cache_of_a_given_size_is_not_measured_for(llama: TinyModel) -> None:
    meter, settings = FakeMeter(900 * MIB), replace(SETTINGS, kv_cache_bytes=MIB)
    assert plan_memory(llama.loaded, settings, 128, (), meter) == MemoryPlan(settings)
    assert meter.begun == 0


def test_a_prompt_shorter_than_a_chunk_is_the_largest_step(llama: TinyModel) -> None:
    settings = replace(SETTINGS, prefill_chunk_tokens=2048, captured_widths=())
    with recorded_steps(llama.loaded.module) as steps:
        plan_memory(llama.loaded, settings, 128, (), FakeMeter(900 * MIB, 0))
    assert steps == [128 + 3]


def test_graphs_larger_than_was_left_for_them_are_told(caplog: pytest.LogCaptureFixture) -> None:
    MemoryPlan(SETTINGS).check(1 << 40)
    MemoryPlan(SETTINGS, 5).check(5)
    assert not caplog.messages
    MemoryPlan(SETTINGS, 5).check(6)
    assert caplog.messages == ["the captured graphs take more memory than was left for them"]
    record = vars(caplog.records[0])
    assert (record["graph_bytes"], record["left_bytes"]) == (6, 5)

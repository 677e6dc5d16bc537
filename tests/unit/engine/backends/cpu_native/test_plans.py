"""Steps replayed from an execution plan equal the model's own steps bit for bit."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.backend import TOKEN_COUNTS, CpuNativeBackend, PlannedBackend
from tandem.engine.backends.cpu_native.layers import PackedLinear
from tandem.engine.backends.cpu_native.plans import ExecutionPlan, Survey, Trace, TraceError, show_products
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.kv_cache.arena import PAGE_TOKENS, KvArena, PageTable
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import load_model
from tandem.engine.steps import Packing
from tests.unit.engine.conftest import MakeModel, TinyModel, torch_threads
from tests.unit.engine.greedy import GreedyHead, greedy, plain_greedy, running
from tests.unit.engine.tiny_models import CONFIGS, VOCABULARY_SIZE

_SERIAL = {"falcon", "falcon_alibi", "gptj", "bloom"}
_EXPERTS = {"mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "phimoe"}
_USUAL = {"llama", "gemma2", "gpt2", "phi3"}
_ALSO_BFLOAT16 = {"llama", "gemma2"}
_SEQUENCES = 8
_PAGES_EACH = 2
_GROUPS = 3
"""Page tables of a sequence: as many as any of these models has groups of layers."""
_PROMPTS = [[5, 17, 80, 3, 44], [9], [3 + step % 90 for step in range(40)], [7, 7, 7]]


class Runner:
    """The CPU backend of a model with an arena."""

    def __init__(self, backends: Backends) -> None:
        loaded = backends.model
        self.arena = KvArena(loaded.layers, _GROUPS * _SEQUENCES * _PAGES_EACH, loaded.dtype, loaded.device)
        backend = backends.steps(self.arena)
        assert isinstance(backend, CpuNativeBackend)
        self.backend = backend


@pytest.fixture
def llama_runner(llama: TinyModel) -> Runner:
    return Runner(llama.with_plans)


def _segments(lengths: list[tuple[int, int]]) -> list[Segment]:
    """Sequences of so many tokens whose keys and values are there, and so many new ones, in scattered pages."""
    segments = []
    for index, (computed, count) in enumerate(lengths):
        pages = range(index, _GROUPS * _SEQUENCES * _PAGES_EACH, _SEQUENCES)
        room = _PAGES_EACH * PAGE_TOKENS
        tables = [PageTable(PAGE_TOKENS, room, reversed(pages[group::_GROUPS])) for group in range(_GROUPS)]
        sequence = Sequence(tables, room, VOCABULARY_SIZE)
        sequence.token_ids = [(11 * index + 7 * step) % 90 + 3 for step in range(computed + count)]
        sequence.advance(computed)
        segments.append(Segment(sequence, count))
    return segments


def _with_past(runner: Runner) -> None:
    for layer in runner.arena.layers:
        for states in (layer.keys, layer.values):
            states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(2)))


def _both_ways(runner: Runner, segments: list[Segment], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits of the modules and of the plan, after the plan's trial."""
    with torch.inference_mode():
        _with_past(runner)
        runner.backend.run(segments, rows)
        replayed = runner.backend.run(segments, rows)
        assert isinstance(runner.backend, PlannedBackend)
        assert runner.backend.is_trusted, "the plan failed its trial"
        return CpuNativeBackend.run_modules(runner.backend, segments, rows), replayed


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if family in _USUAL else pytest.mark.slow)
        for family in sorted(set(CONFIGS) - _SERIAL)
        for dtype in ("float32", "bfloat16")
        if dtype == "float32" or family in _ALSO_BFLOAT16
    ],
)
def test_a_plan_computes_the_same_as_the_modules(family: str, dtype: str, tiny_model: MakeModel) -> None:
    model = tiny_model(family)
    backends = model.with_plans
    if dtype == "bfloat16":
        backends = choose_backends(load_model(model.folder, dtype=dtype), compile_mode="on")
    runner = Runner(backends)
    if family in _EXPERTS:  # which of them are asked depends on the tokens
        assert type(runner.backend) is CpuNativeBackend
        return
    for lengths in [[(9, 1)], [(61, 5)], [(0, 3), (62, 3), (117, 1)], [(step, 1) for step in range(8)]]:
        count = sum(new for _, new in lengths)
        segments = _segments(lengths)
        expected, played = _both_ways(runner, segments, list(range(count)))
        if count in TOKEN_COUNTS:
            assert torch.equal(played, expected)
        assert torch.allclose(played, expected, atol=1e-4 if dtype == "float32" else 0.2)
        assert int(played.abs().max() > 0)


def test_only_the_requested_rows_are_returned_as_a_copy(llama_runner: Runner) -> None:
    segments = _segments([(9, 3), (2, 4)])
    _, everything = _both_ways(llama_runner, segments, list(range(7)))
    expected, rows = _both_ways(llama_runner, segments, [2, 6])
    assert torch.equal(rows, everything[[2, 6]])
    assert torch.allclose(rows, expected, atol=1e-4)
    before = everything.clone()
    _both_ways(llama_runner, _segments([(1, 7)]), list(range(7)))
    assert torch.equal(everything, before)


def test_padding_does_not_change_results(llama_runner: Runner) -> None:
    segments = _segments([(5, 9)])  # nine tokens are padded to ten
    _both_ways(llama_runner, segments, list(range(9)))
    slots = segments[0].sequence.table.slots(0, 14).tolist()
    others = [slot for slot in range((_SEQUENCES * _PAGES_EACH + 1) * PAGE_TOKENS) if slot not in slots]
    spared = [layer.keys.flatten(0, 1)[others] for layer in llama_runner.arena.layers]
    _both_ways(llama_runner, segments, list(range(9)))
    assert all(torch.equal(layer.keys.flatten(0, 1)[others], before)
               for layer, before in zip(llama_runner.arena.layers, spared, strict=True))  # fmt: skip


def _watched(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[int]:
    """Record torch's number of threads at each replay of a plan."""
    seen: list[int] = []
    right = ExecutionPlan._replay

    def watched(self: ExecutionPlan) -> None:
        seen.append(torch.get_num_threads())
        right(self)
        if error is not None:
            raise error

    monkeypatch.setattr(ExecutionPlan, "_replay", watched)
    return seen


def test_a_plan_that_fails_leaves_the_threads_as_they_were(
    llama_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _watched(monkeypatch, RuntimeError("no such kernel"))
    with torch_threads(2), torch.inference_mode():
        llama_runner.backend.run(_segments([(9, 5)]), [4])
        assert (seen, torch.get_num_threads()) == ([1], 2)


@pytest.mark.parametrize("fault", ["numbers", "error"])
async def test_a_plan_that_is_wrong_is_never_used(
    llama: TinyModel, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = ExecutionPlan.replay

    def wrong(self: ExecutionPlan, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        if fault == "error":
            raise RuntimeError("no such kernel")
        logits = right(self, packing, rows)
        logits[-1, 7] += 5.0
        return logits

    monkeypatch.setattr(ExecutionPlan, "replay", wrong)
    with caplog.at_level(logging.WARNING):
        async with running(llama.with_plans, GreedyHead()) as engine:
            await engine.warm_up()
            assert await greedy(engine, _PROMPTS[0], 12) == plain_greedy(llama.reference, _PROMPTS[0], 12)
    reasons = [record.__dict__["reason"] for record in caplog.records]
    assert len(reasons) == 1
    assert reasons[0].startswith("its error is" if fault == "numbers" else "RuntimeError: no such kernel")


def traced(computed: Callable[[Tensor], Tensor]) -> Trace:
    """The trace of a model whose logits are what a function makes of ids."""
    return Trace(lambda input_ids, **_: SimpleNamespace(logits=computed(input_ids)))


DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "nonzero.default depends on the tokens": lambda ids: (ids > 2).nonzero(),
    "_local_scalar_dense.default depends on the tokens": lambda ids: ids if ids[0, 1] > 2 else -ids,
    "tolist reads the numbers": lambda ids: ids + sum(ids[0].tolist()),
}


@pytest.mark.parametrize("reason", DEPENDENT)
def test_a_pass_that_depends_on_the_tokens_is_not_traced(reason: str) -> None:
    with pytest.raises(TraceError, match=re.escape(reason)):
        traced(DEPENDENT[reason])


def test_while_a_pass_is_traced_other_threads_compute(llama_runner: Runner) -> None:
    layers = llama_runner.backend._model.module.modules()
    layer = next(layer for layer in layers if isinstance(layer, PackedLinear))
    inputs = torch.ones(1, 2, layer.in_features)
    with ThreadPoolExecutor(1) as other, show_products():
        beside = other.submit(layer, inputs).result()
    assert torch.equal(beside, layer(inputs))


def test_numbers_that_may_change_between_two_roundings_are_rounded_twice() -> None:
    def computed(ids: Tensor) -> Tensor:
        values = ids.float()
        before = values.bfloat16()
        values.add_(1)
        return torch.stack((before, values.bfloat16()))

    trace = traced(computed)
    ids = torch.arange(3)[None]
    ((before, after),) = trace.run(Survey(shares_casts=trace.shares_casts), ids, ids)
    assert torch.equal(after, before + 1)


def test_after_the_warm_up_a_size_is_compiled_when_it_has_been_wanted_often(llama_runner: Runner) -> None:
    backend = llama_runner.backend
    assert isinstance(backend, PlannedBackend)
    backend.is_warm = True
    with torch.inference_mode():
        steps = [
            (backend.run(_segments([(0, 3), (0, 2)]), range(5)).clone(), 5 in backend.plans) for _ in range(9)
        ]
    assert [has_plan for _, has_plan in steps] == [False] * 7 + [True] * 2
    assert all(torch.equal(logits, steps[0][0]) for logits, _ in steps)

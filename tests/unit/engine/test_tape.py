"""Steps played from a tape are the model's own steps, number for number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.extents import Extent
from tandem.engine.layout import Packing
from tandem.engine.native.attention import WIDEST_SEGMENT, NativeLayout
from tandem.engine.native.steps import TOKEN_COUNTS, TapePacking
from tandem.engine.native.tape import Tape
from tandem.engine.native.trace import TraceError, traced
from tandem.engine.runner import StepRunner
from tandem.engine.segment import Segment
from tandem.engine.sequence import Sequence
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.greedy import GreedyHead, greedy, greedy_together, plain_greedy, running, settle
from tests.unit.engine.tiny_models import CONFIGS, VOCABULARY_SIZE

_SERIAL = {"falcon", "falcon_alibi", "gptj", "bloom"}
_EXPERTS = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "phimoe"}
_USUAL = {"llama", "gemma2", "gpt2", "phi3"}
_EXTENT_TOKENS = 64
_PROMPTS = [[5, 17, 80, 3, 44], [9], [3 + step % 90 for step in range(40)], [7, 7, 7]]


@pytest.fixture
def llama_runner(llama: TinyModel) -> StepRunner:
    return _runner(llama)


def _runner(model: TinyModel) -> StepRunner:
    return StepRunner(model.with_tapes, 8 * _EXTENT_TOKENS)


def _segments(lengths: list[tuple[int, int]]) -> list[Segment]:
    """Sequences of so many tokens whose keys and values are there, and so many new ones."""
    segments = []
    for index, (computed, count) in enumerate(lengths):
        sequence = Sequence(Extent(index * _EXTENT_TOKENS, _EXTENT_TOKENS), _EXTENT_TOKENS, VOCABULARY_SIZE)
        sequence.token_ids = [(11 * index + 7 * step) % 90 + 3 for step in range(computed + count)]
        sequence.advance(computed)
        segments.append(Segment(sequence, count))
    return segments


def _with_past(runner: StepRunner, segments: list[Segment]) -> None:
    for layer in runner.arena.layers:
        for states in (layer.keys, layer.values):
            states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(2)))


def _both_ways(runner: StepRunner, segments: list[Segment], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Logits as the modules say and as the tape says, the tape being tried out first."""
    with torch.inference_mode():
        _with_past(runner, segments)
        runner.run(runner.pack(segments), rows)
        packing = runner.pack(segments)
        assert isinstance(packing, TapePacking)
        played = runner.run(packing, rows)
        assert runner._native is not None
        return runner._run_modules(NativeLayout(segments, runner._native), rows), played


@pytest.mark.parametrize(
    "family",
    [
        family if family in _USUAL else pytest.param(family, marks=pytest.mark.slow)
        for family in sorted(set(CONFIGS) - _SERIAL)
    ],
)
def test_a_tape_says_what_the_modules_say(family: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(family)
    runner = _runner(model)
    if family in _EXPERTS:  # which of them are asked depends on the tokens
        assert runner._tapes is None
        return
    for lengths in [[(9, 1)], [(20, 5)], [(0, 3), (30, 3), (17, 1)], [(step, 1) for step in range(8)]]:
        count = sum(new for _, new in lengths)
        segments = _segments(lengths)
        expected, played = _both_ways(runner, segments, list(range(count)))
        if count in TOKEN_COUNTS:
            assert torch.equal(played, expected)
        assert torch.allclose(played, expected, atol=1e-4)
        assert int(played.abs().max() > 0)


def test_only_the_wanted_rows_come_back_and_are_nobodys_but_the_callers(llama_runner: StepRunner) -> None:
    segments = _segments([(9, 3), (2, 4)])
    _, everything = _both_ways(llama_runner, segments, list(range(7)))
    expected, rows = _both_ways(llama_runner, segments, [2, 6])
    assert torch.equal(rows, everything[[2, 6]])
    assert torch.allclose(rows, expected, atol=1e-4)
    before = everything.clone()
    _both_ways(llama_runner, _segments([(1, 7)]), list(range(7)))
    assert torch.equal(everything, before)


def test_padding_leaves_no_trace(llama_runner: StepRunner) -> None:
    segments = _segments([(5, 9)])  # nine tokens are padded to ten
    _both_ways(llama_runner, segments, list(range(9)))
    spared = [layer.keys[:, :, 14:].clone() for layer in llama_runner.arena.layers]
    _both_ways(llama_runner, segments, list(range(9)))
    assert all(torch.equal(layer.keys[:, :, 14:], before)
               for layer, before in zip(llama_runner.arena.layers, spared, strict=True))  # fmt: skip


def test_of_a_prompt_the_wanted_rows_alone_are_computed(llama_runner: StepRunner) -> None:
    _both_ways(llama_runner, _segments([(9, 5)]), [4])  # from here on it is known that these tapes can
    segments = _segments([(0, 30), (4, 1)])
    expected, played = _both_ways(llama_runner, segments, [29, 30])
    assert torch.allclose(played, expected, atol=1e-4)
    assert llama_runner._tapes is not None
    tape = llama_runner._tapes._tapes[32]
    assert tape.computes_wanted_rows_only
    with torch.inference_mode():
        tape._logits.fill_(7.0)
    _both_ways(llama_runner, segments, [29, 30])
    assert bool((tape._logits[2:] == 7.0).all())
    with torch.inference_mode():
        assert llama_runner.run(llama_runner.pack(segments), []).shape == (0, VOCABULARY_SIZE)
        assert not isinstance(llama_runner.pack(_segments([(0, 60)] * 5)), TapePacking), (
            "more than a tape holds"
        )


def test_long_prompts_go_in_parts_that_a_tape_holds(
    llama: TinyModel, tiny_model: Callable[[str], TinyModel]
) -> None:
    runner = _runner(llama)
    assert runner.prompt_tokens(512) == 512, "it is not known yet that a tape computes the wanted rows only"
    _both_ways(runner, _segments([(9, 5)]), [4])
    assert [runner.prompt_tokens(most) for most in (7, 512)] == [7, WIDEST_SEGMENT]
    assert runner._tapes is not None
    runner._tapes._is_trusted = False
    assert runner.prompt_tokens(512) == 512
    bounded = _runner(tiny_model("gemma2"))
    _both_ways(bounded, _segments([(9, 5)]), [4])
    assert bounded.prompt_tokens(512) == 512, "its modules compute the wanted rows only"


def test_where_logits_are_bounded_a_prompt_is_run_plainly(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the last layer would be computed for all its tokens."""
    runner = _runner(tiny_model("gemma2"))
    _both_ways(runner, _segments([(9, 5)]), list(range(5)))
    played: list[int] = []
    right = Tape.play

    def noted(self: Tape, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        played.append(packing.token_count)
        return right(self, packing, rows)

    monkeypatch.setattr(Tape, "play", noted)
    with torch.inference_mode():
        for count, rows in [(30, [29]), (30, list(range(30))), (5, [4])]:
            logits = runner.run(runner.pack(_segments([(0, count)])), rows)
            assert logits.shape == (len(rows), VOCABULARY_SIZE)
    assert played == [30, 5], "all rows of a prompt, or few tokens, are another matter"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _watched(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[int]:
    """How many threads torch had at each playing of a tape."""
    seen: list[int] = []
    right = Tape._play

    def watched(self: Tape) -> None:
        seen.append(torch.get_num_threads())
        right(self)
        if error is not None:
            raise error

    monkeypatch.setattr(Tape, "_play", watched)
    return seen


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("most_numbers", "threads"), [(32_768, 1), (10, 2)])
def test_a_small_tape_wakes_no_second_thread(
    llama_runner: StepRunner, monkeypatch: pytest.MonkeyPatch, most_numbers: int, threads: int
) -> None:
    monkeypatch.setattr("tandem.engine.native.tape._ONE_THREADS_NUMBERS", most_numbers)
    seen = _watched(monkeypatch)
    expected, played = _both_ways(llama_runner, _segments([(9, 5)]), list(range(5)))
    assert torch.equal(played, expected)
    assert set(seen) == {threads}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_tape_that_fails_leaves_the_threads_as_they_were(
    llama_runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _watched(monkeypatch, RuntimeError("no such kernel"))
    with torch.inference_mode():
        llama_runner.run(llama_runner.pack(_segments([(9, 5)])), [4])
    assert seen == [1]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("seconds", "largest"), [(1e6, WIDEST_SEGMENT), (0.0, 8)])
async def test_tapes_are_made_before_they_are_wanted_as_time_allows(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, seconds: float, largest: int
) -> None:
    monkeypatch.setattr("tandem.engine.engine._WARM_UP_SECONDS", seconds)
    async with running(llama.with_tapes, GreedyHead()) as engine:
        await engine.warm_up()
        assert engine._runner._tapes is not None
        assert list(engine._runner._tapes._tapes) == [size for size in TOKEN_COUNTS if size <= largest]
        await settle(engine)
        assert engine.usage.retained_tokens == engine.usage.reserved_tokens == 0
        assert await greedy(engine, _PROMPTS[2], 12) == plain_greedy(llama.reference, _PROMPTS[2], 12)


@pytest.mark.parametrize("fault", ["numbers", "error"])
async def test_a_tape_that_is_wrong_is_never_used(
    llama: TinyModel, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = Tape.play

    def wrong(self: Tape, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        if fault == "error":
            raise RuntimeError("no such kernel")
        logits = right(self, packing, rows)
        logits[-1, 7] += 5.0
        return logits

    monkeypatch.setattr(Tape, "play", wrong)
    with caplog.at_level(logging.WARNING):
        async with running(llama.with_tapes, GreedyHead()) as engine:
            await engine.warm_up()
            assert await greedy(engine, _PROMPTS[0], 12) == plain_greedy(llama.reference, _PROMPTS[0], 12)
    reasons = [record.__dict__["reason"] for record in caplog.records]
    assert len(reasons) == 1
    assert reasons[0].startswith("logits differ by" if fault == "numbers" else "RuntimeError: no such kernel")


@pytest.mark.parametrize("family", sorted(_USUAL))
async def test_texts_are_the_same_with_tapes_and_without(
    family: str, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    played = 0
    right = Tape.play

    def counted(self: Tape, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        nonlocal played
        played += 1
        return right(self, packing, rows)

    monkeypatch.setattr(Tape, "play", counted)
    async with running(model.with_tapes, GreedyHead()) as engine:
        with_tapes = await greedy_together(engine, _PROMPTS, 12)
    assert played > 8
    async with running(model.loaded, GreedyHead()) as engine:
        without = await greedy_together(engine, _PROMPTS, 12)
    assert with_tapes == without == [plain_greedy(model.reference, prompt, 12) for prompt in _PROMPTS]


def test_a_pass_that_depends_on_the_tokens_is_not_traced() -> None:
    class Choosy(torch.nn.Module):
        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            chosen = (input_ids > 2).nonzero()
            return Packing([]), chosen

    with pytest.raises(TraceError):
        traced(Choosy())

"""Capturing belongs to the model's device, whichever is current in the thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.backends.cuda_graphs.capture import (
    CaptureOutcome,
    capture_each,
    captures_of,
    cuda_graph_capture,
)
from tandem.types import GraphCaptures


class FakeCuda:
    """Says which device was current when something was made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.made: list[tuple[str, int]] = []
        patch.setattr(torch.cuda, "device", self._device)
        patch.setattr(torch.cuda, "stream", self._block("stream"))
        patch.setattr(torch.cuda, "graph", self._block("graph"))
        for name in ("graph_pool_handle", "current_stream", "Stream", "CUDAGraph"):
            patch.setattr(torch.cuda, name, self._maker(name))

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def _block(self, name: str) -> Any:
        @contextmanager
        def block(*_: object, **__: object) -> Iterator[None]:
            self.made.append((name, self.current))
            yield

        return block

    def _maker(self, name: str) -> Any:
        class Made:
            def wait_stream(self, _: object) -> None: ...

            def replay(self) -> None: ...

        def make(*_: object) -> Made:
            self.made.append((name, self.current))
            return Made()

        return make


def test_the_models_device_is_current_while_its_work_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seen = FakeCuda(monkeypatch), []
    capture = cuda_graph_capture(torch.device("cuda:1"))
    output = torch.zeros(1)

    def work() -> torch.Tensor:
        seen.append(cuda.current)
        return output

    assert capture(work)() is output
    assert seen == [1, 1, 1], "two runs to warm up, and the one that is captured"
    assert {name for name, _ in cuda.made} >= {"graph_pool_handle", "Stream", "CUDAGraph", "graph"}
    assert {device for _, device in cuda.made} == {1}
    assert cuda.current == 0


def test_the_largest_comes_first_and_each_stands_alone(caplog: pytest.LogCaptureFixture) -> None:
    order = []

    def make(size: int) -> int:
        order.append(size)
        if size in (9, 4):
            raise RuntimeError("CUDA out of memory\nand more")
        return size

    made, outcomes = capture_each(
        "numbers", [1, 9, 4, 2, 6], make, lambda size: 3.0 * (size == 2), 1.0, torch.device("cpu")
    )
    assert order == [9, 6, 4, 2, 1]
    assert made == [1, 6]
    assert [outcome.reason for outcome in outcomes] == [
        None,
        "its error is 3 times torch's own, which must be at most 1",
        "RuntimeError: CUDA out of memory",
        None,
        "RuntimeError: CUDA out of memory",
    ]
    (record,) = caplog.records
    assert vars(record)["captured"] == ["1", "6"]
    assert set(vars(record)["not_captured"]) == {"2", "4", "9"}
    assert vars(record)["memory_bytes"] == 0


def test_the_log_says_how_much_memory_of_a_gpu_was_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 1000
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: taken * (device.index == 1))

    def make(size: int) -> int:
        nonlocal taken
        taken += size
        return size

    with caplog.at_level("INFO"):
        capture_each("numbers", [30, 4], make, lambda _: 0.0, 1.0, torch.device("cuda:1"))
    (record,) = caplog.records
    assert vars(record)["memory_bytes"] == 34


def test_captures_are_put_into_words() -> None:
    assert captures_of(None, object()) is None
    steps, proposals = SimpleNamespace(), SimpleNamespace()
    steps.outcomes = [
        CaptureOutcome("1 x 1", None, "steps", 10),
        CaptureOutcome("32 x 5", "OutOfMemoryError: too large", "steps"),
    ]
    proposals.outcomes = [CaptureOutcome("1 x 2, 4 tokens", None, "proposals", 5)]
    assert captures_of(steps, None, proposals) == GraphCaptures(
        2, ("steps 32 x 5: OutOfMemoryError: too large",), 15
    )

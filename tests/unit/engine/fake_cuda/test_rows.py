"""Whatever rows a step of the target holds, the host waits for the device once, and the rows are those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tandem.engine.backends.cuda_graphs.capture import without_capture
from tandem.types import Delta, RowKind, SamplingParams, VerifyStep
from target_service import captured_rows
from target_service.captured_rows import Draw, _Graph, _Shape
from target_service.row_requests import RowRequest
from target_service.rows import answers, processed, verifications
from tests.unit.engine.fake_cuda.conftest import _QueuedCopy
from tests.unit.engine.fake_cuda.device import CUDA
from tests.unit.engine.fake_cuda.late_device import late_device
from tests.unit.engine.fake_cuda.steps import RecordingCapture
from tests.unit.target_service.mixes import CPU, VOCABULARY_SIZE, Asked, asked_mixes, some_logits, to_requests

pytestmark = pytest.mark.usefixtures("_guard")


@settings(max_examples=30, deadline=None)
@given(asked=asked_mixes())
def test_any_mix_of_rows_waits_once(asked: Asked) -> None:
    logits = some_logits(asked)
    expected = verifications(to_requests(asked, CPU), logits)
    with late_device() as device:
        requests = to_requests(asked, CUDA)
        on_device = logits.pin_memory().to(CUDA, non_blocking=True)
        assert device.waits == 0
        found = verifications(requests, on_device)
        assert device.waits == 1
    with np.printoptions(floatmode="unique", threshold=1 << 30):
        assert [repr(each) for each in found] == [repr(each) for each in expected]


@settings(max_examples=25, deadline=None)
@given(asked=asked_mixes())
def test_rows_drawn_by_a_graph_wait_once(asked: Asked) -> None:
    """The numbers of a step are read late, from a buffer that the next step fills again."""
    logits = some_logits(asked)
    own = to_requests(asked, CPU)
    draws = [draw for draw in Draw if all(map(draw.serves, own))]
    if not draws:
        return
    expected = verifications(own, logits)
    with pytest.MonkeyPatch.context() as patched, late_device() as device:
        patched.setattr(captured_rows, "transfer_to", lambda _: _QueuedCopy())
        buffer = torch.full((32, VOCABULARY_SIZE), torch.nan, device=CUDA)
        graph = _Graph(_Shape(32, draws[-1]), buffer, without_capture)
        requests = to_requests(asked, CUDA)
        on_device = logits.pin_memory().to(CUDA, non_blocking=True)
        given_logits = processed(None, requests, on_device)
        graph.rows(requests, torch.zeros_like(given_logits))
        assert device.waits == 1
        found = answers(requests, graph.rows(requests, given_logits))
        assert device.waits == 2
    with np.printoptions(floatmode="unique", threshold=1 << 30):
        assert [repr(each) for each in found] == [repr(each) for each in expected]


@pytest.mark.parametrize(("draw", "kernels"), [(Draw.ARGMAX, 8), (Draw.PLAIN, 48), (Draw.TRUNCATED, 121)])
def test_a_graph_of_rows_never_waits(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch, draw: Draw, kernels: int
) -> None:
    """With the vocabulary of Llama 3. A graph cannot hold a wait; each of its kernels costs a launch."""
    monkeypatch.setattr(captured_rows, "transfer_to", lambda _: _QueuedCopy())
    capture = RecordingCapture()
    rows, vocabulary_size = 8, 128256
    with torch.inference_mode():
        graph = _Graph(_Shape(rows, draw), torch.zeros(rows, vocabulary_size, device=CUDA), capture)
        found = graph._replay()
    assert found.dtype == torch.int64
    assert found.shape == (rows, 1 if draw is Draw.ARGMAX else 4 + 512)
    assert capture.recorder is not None
    assert capture.recorder.kernel_count == kernels
    assert capture.recorder.largest.output_bytes <= 8 * rows * vocabulary_size


def test_the_rows_numbers_go_in_by_one_copy() -> None:
    support = (np.array([3, 9]), np.array([7]))
    mixes = [
        (RowKind.TOKEN, SamplingParams(temperature=0.0), ()),
        (RowKind.TOKEN, SamplingParams(temperature=0.7, top_p=0.9), ()),
        (RowKind.SUPPORT, SamplingParams(temperature=1.0, top_k=9), support),
        (RowKind.SUPPORT, SamplingParams(temperature=0.5), support),
        (RowKind.DENSE, SamplingParams(), ()),
    ]
    requests = [
        RowRequest(VerifyStep(Delta(4, [1] * 3), kind, 3, supports), sampling)
        for kind, sampling, supports in mixes
    ]
    with late_device() as device:
        verifications(requests, torch.zeros(15, VOCABULARY_SIZE, device=CUDA))
        assert device.copies_in == 1
        assert device.waits == 1

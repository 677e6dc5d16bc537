"""The fake device refuses what a captured graph cannot hold, whoever catches the error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

from tests.unit.engine.fake_cuda.device import CUDA, HostSynchronizationError, recording

_REFUSALS = (DataDependentOutputException, DynamicOutputShapeException, HostSynchronizationError)


@pytest.mark.parametrize(
    "waits",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: bool((tensor > 0).any()),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.ones(3).to(CUDA),
        lambda tensor: tensor.copy_(torch.ones(3)),
    ],
)
def test_waiting_for_the_device_is_found(fake_cuda: None, waits: Callable[[Tensor], object]) -> None:
    tensor = torch.zeros(3, device=CUDA)

    def hides_its_failure() -> None:
        with recording(may_copy=False), suppress(*_REFUSALS):
            waits(tensor)

    with pytest.raises(AssertionError, match="caught on the way"):
        hides_its_failure()


def test_a_tensor_on_the_wrong_device_is_found(fake_cuda: None) -> None:
    with pytest.raises(FakeTensorDeviceMismatchError), recording(may_copy=True):
        torch.zeros(3, device=CUDA) + torch.zeros(3)


def test_views_launch_nothing(fake_cuda: None) -> None:
    tensor = torch.zeros(4, 6, device=CUDA)
    with recording(may_copy=False) as recorder:
        tensor.view(24).reshape(2, 12).T[1:].unsqueeze(0).expand(5, -1, -1)
    assert recorder.kernel_count == 0
    with recording(may_copy=False) as recorder:
        torch.nn.functional.linear(tensor, tensor).T.contiguous()
        torch.nn.functional.rms_norm(tensor, (6,), tensor[0])
    assert [launch.name for launch in recorder.launches] == [
        "aten::mm",
        "aten::clone",
        "aten::_fused_rms_norm",
    ]
    assert recorder.launches[0].output_bytes == 4 * 4 * 4

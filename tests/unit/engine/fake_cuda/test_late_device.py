"""The late device counts every way in which the host waits for it, and runs nothing before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.engine.fake_cuda.device import CUDA
from tests.unit.engine.fake_cuda.late_device import late_device

pytestmark = pytest.mark.usefixtures("_guard")


@pytest.mark.parametrize(
    "waits",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: bool((tensor > 0).any()),
        lambda tensor: tensor.cpu(),
        lambda tensor: torch.ones(3).to(CUDA),
        lambda tensor: torch.tensor([1, 2], device=CUDA),
        lambda tensor: torch.asarray([1, 2], device=CUDA),
        lambda tensor: tensor.copy_(torch.ones(3)),
    ],
)
def test_each_wait_is_counted(waits: Callable[[Tensor], object]) -> None:
    with late_device() as device:
        tensor = torch.zeros(3, device=CUDA)
        assert device.waits == 0
        waits(tensor)
    assert device.waits == 1


def test_work_and_queued_copies_run_when_the_host_waits() -> None:
    with late_device() as device:
        source = torch.ones(3)
        tensor = source.pin_memory().to(CUDA, non_blocking=True)
        doubled = tensor * 2
        doubled[1:] += 1.0
        assert device.waits == 0
        source[0] = 5.0  # too early: the device has not read it
        assert doubled.cpu().tolist() == [10.0, 3.0, 3.0]
    assert device.waits == 1
    assert device.copies_in == 1

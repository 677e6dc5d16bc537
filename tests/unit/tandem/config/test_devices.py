"""All names of a device mean the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from draft_service.settings import DraftSettings
from tandem.config.devices import as_torch
from target_service.settings import TargetSettings


@pytest.mark.parametrize(
    ("name", "device"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("gpu", "cuda"), ("cuda:1", "cuda:1"), ("gpu:12", "cuda:12")],
)
def test_gpu_and_cuda_are_the_same_everywhere(name: str, device: str) -> None:
    assert as_torch(name) == device
    assert TargetSettings(model=Path(), device=name).compute_device == device
    assert DraftSettings(device=name).compute_device == device
    assert DraftSettings(draft_devices=name).compute_device == device


@pytest.mark.parametrize("name", ["", "tpu", "cpu:0", "cuda:", "cuda:x", "CUDA", "gpu0", "cuda:0,1"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="it must be cpu, cuda, cuda:N, gpu or gpu:N"):
        TargetSettings(model=Path(), device=name)

"""Copies between host and device around a step: one in, which the host does not wait for, and one out, which it does.

Every other way to look at a number of the device, or to bring one there from ordinary memory, makes the host wait until
the device has done all of its work so far.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.types import FloatArray, IntArray

HostArray: TypeAlias = npt.NDArray[Any]
"""int64, float64 or float32."""

_TORCH = {"int64": torch.int64, "float64": torch.float64}
_NUMPY = {torch.int64: np.int64, torch.float64: np.float64, torch.float32: np.float32}


def to_device(arrays: SequenceOf[IntArray | FloatArray], device: torch.device) -> list[Tensor]:
    """Brings int64 and float64 arrays to the device in one copy, which the host does not wait for; on a CPU the tensors
    are in the arrays' own memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not arrays:
        return []
    packed = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in arrays])
    # torch keeps pinned memory that a copy still reads from being used again.
    on_device = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    parts = torch.split(on_device, [array.size for array in arrays])
    return [part.view(_TORCH[array.dtype.name]).view(array.shape)
            for part, array in zip(parts, arrays, strict=True)]  # fmt: skip


def to_host(tensors: SequenceOf[Tensor]) -> list[HostArray]:
    """Brings tensors of int64, float64 and float32 to the host in one copy: the only wait of a step."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    words = [tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors]
    packed = torch.cat(words).cpu().numpy()
    ends = np.cumsum([word.numel() for word in words])[:-1]
    return [
        part.view(_NUMPY[tensor.dtype]).reshape(tensor.shape)
        for part, tensor in zip(np.split(packed, ends), tensors, strict=True)
    ]

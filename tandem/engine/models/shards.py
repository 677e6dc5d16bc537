"""Reads a checkpoint tensor by tensor, each straight to the model's device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def stored_tensors(files: Sequence[Path], device: torch.device) -> dict[str, StoredTensor]:
    """The tensors of the files by name, none of them read yet."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        file: Any = safe_open(path, framework="pt")
        tensors.update({name: StoredTensor(file, path, name, device) for name in file.keys()})  # noqa: SIM118
    return tensors


class StoredTensor:
    """A tensor in a file, to be passed to transformers in a state dict.

    Behaves as the slices that transformers takes from the files itself: `tensor[...].to(device, dtype)` reads it. It
    arrives on the model's device, since transformers moves tensors to another device than the CPU only if the package
    accelerate is installed.
    """

    def __init__(self, file: Any, path: Path, name: str, device: torch.device) -> None:
        self._file = file
        self._path = path
        self._name = name
        self._device = device

    def __getitem__(self, index: EllipsisType) -> StoredTensor:
        """The whole tensor, still in its file."""
        return self

    def get_dtype(self) -> str:
        """Its type as safetensors names it."""
        return str(self._file.get_slice(self._name).get_dtype())

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Reads the tensor.

        Args:
            device: ignored in favour of the model's.
            dtype: the type to convert it to; None keeps the file's.
        """
        # Mapped, not read: a tensor that needs no conversion stays in the pages of its file.
        mapped: Tensor = self._file.get_tensor(self._name)
        if mapped.device == self._device and dtype in (None, mapped.dtype):
            return mapped
        # Through a mapping of its own, whose pages are given back once the tensor is copied. Those of a mapping that
        # stays open would fill the memory with the whole checkpoint.
        with safe_open(self._path, framework="pt") as file:
            stored: Tensor = file.get_tensor(self._name)
            return stored.to(self._device, dtype)

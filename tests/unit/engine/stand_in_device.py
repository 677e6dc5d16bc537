"""A device that is not there: its tensors compute on the CPU, and tell where the host would wait for a real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda:0")
_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.nonzero, Tensor.__contains__, torch.nonzero, torch.bincount, Tensor.bincount,
    torch.unique, Tensor.unique, torch.masked_select, Tensor.masked_select,
}  # fmt: skip
"""What gives numbers to the host, or has a result whose size depends on them."""


class DeviceTensor(Tensor):
    """Says that it is on the device, and has its numbers on the CPU."""

    on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_subclass(cls, inner)
        made.on_cpu = inner
        return made


def _inner_of(value: Any) -> Any:
    return value.on_cpu if isinstance(value, DeviceTensor) else value


def _outer_of(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


@dataclass
class StandInDevice(TorchFunctionMode):
    """Stands in for a GPU during the block."""

    waits: list[str] = field(default_factory=list)
    """Functions of ours in which the host waited, in order."""
    pinned: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return DeviceTensor(tensor.clone())

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        first = args[0] if args else None
        is_there = isinstance(first, DeviceTensor)
        if func == Tensor.device.__get__ and is_there:
            return DEVICE
        if func is Tensor.pin_memory:
            self.pinned.append(first.clone())  # type: ignore[union-attr]
            return self.pinned[-1]
        if func in (Tensor.to, Tensor.cpu):
            named = "cpu" if func is Tensor.cpu else _device_of(args[1:], given)
            if is_there and named == "cpu":
                self._wait()
                return first.on_cpu.clone()  # type: ignore[union-attr]
            if not is_there and named == "cuda":
                is_pinned = any(first is each for each in self.pinned)
                if not (is_pinned and given.get("non_blocking")):
                    self._wait()
                return self.put(first)  # type: ignore[arg-type]
        return self._compute(func, args, given)

    def _compute(self, func: Any, args: Sequence[Any], given: dict[str, Any]) -> Any:
        """What a function makes of the numbers, on the device if any of them are there."""
        are_there = any(isinstance(each, DeviceTensor) for each in tree_leaves((args, given)))
        if func in _READS and are_there:
            self._wait()
            return func(*tree_map(_inner_of, args), **tree_map(_inner_of, given))
        if func in (Tensor.__getitem__, Tensor.__setitem__) and are_there:
            self._look_at_index(args[1])
        if given.get("device") is not None and torch.device(given["device"]).type == "cuda":
            are_there = True
            given["device"] = "cpu"
            if func in (torch.tensor, torch.as_tensor, torch.asarray):
                self._wait()  # from ordinary memory
        found = func(*tree_map(_inner_of, args), **tree_map(_inner_of, given))
        if not are_there:
            return found
        for each in args:  # it was changed in place
            if isinstance(each, DeviceTensor) and each.on_cpu is found:
                return each
        return tree_map(_outer_of, found)

    def _look_at_index(self, index: Any) -> None:
        """Numbers that index a tensor are sent to its device, and a mask's count is read from there."""
        for each in index if isinstance(index, tuple) else (index,):
            is_mask = isinstance(each, Tensor) and each.dtype is torch.bool
            is_sent = isinstance(each, list) or (
                isinstance(each, Tensor) and not isinstance(each, DeviceTensor)
            )
            if is_mask or is_sent:
                self._wait()

    def _wait(self) -> None:
        """Note which function of ours this is about."""
        frame = sys._getframe(2)
        while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            assert frame.f_back is not None
            frame = frame.f_back
        self.waits.append(frame.f_code.co_name)


def _device_of(args: Sequence[Any], given: dict[str, Any]) -> str:
    named = given.get("device", next((each for each in args if isinstance(each, torch.device | str)), None))
    return "" if named is None else torch.device(named).type


@contextmanager
def stand_in_device() -> Iterator[StandInDevice]:
    """A stand-in for a GPU."""
    with torch.inference_mode(), StandInDevice() as device:
        yield device

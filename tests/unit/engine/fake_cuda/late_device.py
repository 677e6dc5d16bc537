"""A device that is always late: operations on `cuda` are queued, and run on the CPU when the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.unit.engine.fake_cuda.device import CUDA


class LateTensor(Tensor):
    """A tensor on the device. Its numbers are there once the device has got so far."""

    meta: Tensor
    numbers: Tensor | None = None

    @staticmethod
    def __new__(cls, meta: Tensor) -> LateTensor:
        """A tensor like `meta`."""
        made: LateTensor = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=CUDA
        )
        made.meta = meta
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is of another signature than its protocol
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Without its device's mode there is nobody to queue for."""
        raise AssertionError(f"{func} outside of the late device")


class LateDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Queues what runs on the device, and counts how often the host waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = 0
        self.copies_in = 0
        self._queued: list[Callable[[], None]] = []

    def wait(self) -> None:
        """The host waits until all that is queued has run."""
        self.waits += 1
        while self._queued:
            self._queued.pop(0)()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation of the host, queues one of the device, and waits where a number crosses."""
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        late = [leaf for leaf in leaves if isinstance(leaf, LateTensor)]
        device = kwargs.get("device")
        goes_to_device = device is not None and torch.device(device).type == "cuda"
        if not late and not goes_to_device:
            return func(*args, **kwargs)
        if late and _reads(func, args, device):
            self.wait()
            return _run(func, args, kwargs)
        sources = [leaf for leaf in leaves if _is_on_host(leaf) and leaf.dim()]
        if sources:
            self.copies_in += 1
            if not (kwargs.get("non_blocking") or _is_queued_copy(func, args)):
                self.wait()
        return self._queue(func, args, kwargs)

    def _queue(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        on_meta = kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {})
        metas = func(*tree_map(_meta, tuple(args)), **tree_map(_meta, on_meta))
        on_host = kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})
        if func._schema.is_mutable:
            self._queued.append(lambda: _run(func, args, on_host))
            return args[0]
        outputs = tree_map(lambda leaf: LateTensor(leaf) if isinstance(leaf, Tensor) else leaf, metas)

        def run() -> None:
            found = _run(func, args, on_host)
            for output, numbers in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
                if isinstance(output, LateTensor):
                    output.numbers = numbers

        self._queued.append(run)
        return outputs


class _PythonCalls(TorchFunctionMode):
    """Turns calls that torch answers below its dispatcher into copies that the device sees."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes tensors of lists on the host first, and lists of tensors there as well."""
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.asarray, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.tolist and isinstance(args[0], LateTensor):
            return args[0].cpu().tolist()
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@contextmanager
def late_device() -> Iterator[LateDevice]:
    """Tensors made on `cuda` within are late. Pinned memory is ordinary memory, which the device reads late as well."""
    with (
        mock.patch.object(torch.cuda, "_lazy_init"),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        torch.inference_mode(),
        LateDevice() as device,
        _PythonCalls(),
    ):
        yield device


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*tree_map(_numbers, tuple(args)), **tree_map(_numbers, kwargs))


def _reads(func: Any, args: Any, device: Any) -> bool:
    """True if the operation brings a number of the device to the host."""
    name = func._schema.name
    if name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"):
        return True
    if name == "aten::copy_" and _is_on_host(args[0]):
        return True
    return device is not None and torch.device(device).type == "cpu"


def _is_queued_copy(func: Any, args: Any) -> bool:
    return func._schema.name == "aten::copy_" and len(args) > 2 and bool(args[2])


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, LateTensor)


def _meta(value: Any) -> Any:
    if isinstance(value, LateTensor):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) and value.dim() else value


def _numbers(value: Any) -> Any:
    if not isinstance(value, LateTensor):
        return value
    assert value.numbers is not None, "read before the device has got so far"
    return value.numbers

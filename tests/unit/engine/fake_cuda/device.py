"""A device that computes nothing and shows what it is asked: fake tensors on `cuda`, at any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)

_NOT_KERNELS = frozenset(
    (
        "aten::_unsafe_view", "aten::detach", "aten::detach_", "aten::empty", "aten::empty_like", "aten::empty_strided",
        "aten::lift_fresh", "aten::new_empty",
    )
)  # fmt: skip
_KERNELS = {"torch_attn::_varlen_attn": 2}
"""Operations that launch more than one. `varlen_attn` fills the state of a generator that it does not use."""
_CONTIGUOUS = frozenset(("aten::_fused_rms_norm",))
"""Operations that copy their first argument if it is not contiguous."""
_WHOLE = frozenset(("aten::_fused_rms_norm", "aten::scaled_dot_product_attention"))
"""Operations with a CUDA kernel of their own, which a CPU builds of others."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation on the device."""

    name: str
    kernels: int
    output_bytes: int
    """Of its largest output."""
    shape: tuple[int, ...]
    """Of that output."""


class HostSynchronizationError(AssertionError):
    """The host waits for the device, or the device for the host, where neither may."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Writes down each operation on the device that is more than a view."""

    def __init__(self, *, may_copy: bool) -> None:
        """
        Args:
            may_copy: allow copies between host and device, as at the beginning of a step that is not captured.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.synchronizations: list[str] = []
        """Operations that were refused, for whoever catches the error."""
        self._may_copy = may_copy

    @property
    def largest(self) -> Launch:
        """The operation with the largest output."""
        return max(self.launches, key=lambda launch: launch.output_bytes)

    @property
    def kernel_count(self) -> int:
        """Kernels in all."""
        return sum(launch.kernels for launch in self.launches)

    def count(self, name: str) -> int:
        """How often an operation ran."""
        return sum(launch.name == name for launch in self.launches)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation, or those that it is made of, and writes it down."""
        name, kwargs = func._schema.name, dict(kwargs or {})
        if name.startswith("prim::"):
            return func(*args, **kwargs)
        if name not in _WHOLE:
            # In inference mode torch passes composite operations on as they are.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        try:
            result = func(*args, **kwargs)
            self._record(name, func, (args, kwargs), result)
        except (DataDependentOutputException, DynamicOutputShapeException, HostSynchronizationError):
            self.synchronizations.append(name)
            raise
        return result

    def _record(self, name: str, func: Any, inputs: Any, result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        devices = {leaf.device.type for leaf in (*tree_leaves(inputs), *outputs) if isinstance(leaf, Tensor)}
        if "cuda" not in devices:
            return
        given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        # A number of no dimensions goes along as an argument of the kernel.
        crosses = (
            name == "aten::_local_scalar_dense"
            or any(leaf.device.type != "cuda" and leaf.dim() for leaf in given)
            or any(leaf.device.type != "cuda" for leaf in outputs)
        )
        if crosses and not self._may_copy:
            raise HostSynchronizationError(name)
        for leaf in outputs:
            assert all(isinstance(size, int) for size in leaf.shape), f"{name} gives no fixed shape"
        if name in _NOT_KERNELS or _is_view(func):
            return
        # A result written in place takes no memory.
        fresh = [leaf for leaf in outputs if not func._schema.is_mutable] or [torch.empty(0)]
        largest = max(fresh, key=lambda leaf: leaf.nbytes)
        kernels = _KERNELS.get(name, 1)
        if name in _CONTIGUOUS:
            kernels += not given[0].is_contiguous()
        launch = Launch(name, kernels, largest.nbytes, tuple(largest.shape))
        self.launches.append(launch)


def _is_view(func: Any) -> bool:
    infos = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


class _HostMemory(TorchFunctionMode):
    """Keeps pinned buffers real, as numpy fills them: only what reaches the device is fake."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        goes_to_device = any(
            isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in tree_leaves((args, kwargs))
        )
        if kwargs.pop("pin_memory", False) or (real and len(real) == len(tensors) and not goes_to_device):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if real:
            args, kwargs = tree_map(self._faked, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _faked(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self._fake.from_tensor(value) if is_real else value


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """All tensors made within are fake, but for pinned ones."""
    fake = FakeTensorMode(allow_non_fake_inputs=False)
    with fake, _HostMemory(fake):
        yield fake


@contextmanager
def recording(*, may_copy: bool) -> Iterator[Recorder]:
    """Records the operations within; see `Recorder`."""
    recorder = Recorder(may_copy=may_copy)
    with torch.inference_mode(), recorder:
        yield recorder
    assert not recorder.synchronizations, "an error was caught on the way"

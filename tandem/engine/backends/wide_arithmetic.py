"""Torch's own computation in a wider dtype, without a second copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_FLOATS = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16))


class _Wide(TorchFunctionMode):
    """Widens what every function of torch is called with; a layer's weights are widened while it computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _CASTS:
            return args[0].to(self._dtype)
        if (
            func.__name__ == "__get__"
        ):  # an attribute such as `shape`, for which a whole weight would be widened
            return func(*args, **kwargs or {})
        args, kwargs = tree_map(self._widened, (tuple(args), dict(kwargs or {})))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if self._dtype is not torch.float64:
                raise
            # Some of torch's functions, such as the product of a mixture's experts, do not take float64.
            args, kwargs = tree_map(_narrowed, (args, kwargs))
            return tree_map(self._widened, func(*args, **kwargs))

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _FLOATS and value.dtype is not self._dtype:
            return value.to(self._dtype)
        return self._dtype if isinstance(value, torch.dtype) and value in _FLOATS else value


def _narrowed(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float64 else value


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """All of torch's functions compute in `dtype`. What they write to in place must have that dtype already."""
    with _Wide(dtype):
        yield

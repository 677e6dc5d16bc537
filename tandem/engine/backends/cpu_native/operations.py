"""A model's small operations as calls that write their results to a given place, by a kernel or by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.library.kernels import (
    DIMENSIONS,
    DTYPES,
    INT64_KIND,
    GatherCall,
    KernelCall,
    MeanCall,
    Operand,
    Operation,
    PointwiseCall,
    Routine,
    kind_of,
)

_aten: Any = torch.ops.aten

_Maker = Callable[..., list[KernelCall]]


class UnknownOperationError(Exception):
    """The kernels cannot compute this operation; the text says why. Never leaves this package."""


def kernel_calls(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
) -> list[KernelCall]:
    """The calls that write an operation's result to `output`; a concatenation has one for each part.

    The tensors must outlive the calls. The named arguments of a copy say what `output` is already.

    Raises:
        UnknownOperationError: torch has to compute it.
    """
    maker = _MAKERS.get(target)
    if maker is None or (named and maker is not _copy):
        raise UnknownOperationError(f"{target} with {', '.join(named) or 'any arguments'}")
    return maker(output, *arguments)


def _unary(operation: Operation) -> _Maker:
    def made(output: Tensor, value: Tensor) -> list[KernelCall]:
        if value.dtype != output.dtype:
            raise UnknownOperationError(f"{operation.name} from {value.dtype} to {output.dtype}")
        return [_pointwise(operation, output, value)]

    return made


def _binary(operation: Operation) -> _Maker:
    def made(output: Tensor, first: Tensor, second: Tensor | float) -> list[KernelCall]:
        return [_pointwise(operation, output, first, second)]

    return made


def _copy(output: Tensor, value: Tensor) -> list[KernelCall]:
    return [_pointwise(Operation.COPY, output, value)]


def _power(output: Tensor, value: Tensor, exponent: float) -> list[KernelCall]:
    if exponent != 2:
        raise UnknownOperationError(f"to the power of {exponent}")
    return [_pointwise(Operation.SQUARE, output, value)]


def _concatenation(output: Tensor, parts: SequenceOf[Tensor], dim: int = 0) -> list[KernelCall]:
    places = torch.split(output, [part.shape[dim] for part in parts], dim)
    return [_pointwise(Operation.COPY, place, part) for place, part in zip(places, parts, strict=True)]


def _mean(output: Tensor, value: Tensor, dims: list[int], _keepdim: bool = False) -> list[KernelCall]:
    is_last = [dim % value.dim() for dim in dims] == [value.dim() - 1]
    if not (
        is_last and _is_plain(value) and _is_plain(output) and output.dtype == value.dtype == torch.float32
    ):
        raise UnknownOperationError("a mean of what does not lie side by side")
    width = value.shape[-1]
    if width < 8:  # torch sums eight numbers side by side
        raise UnknownOperationError("a mean of so few that torch takes them in another order")
    call = MeanCall(value.data_ptr(), output.data_ptr(), value.numel() // width, width)
    return [KernelCall(Routine.MEAN, call)]


def _embedding(output: Tensor, table: Tensor, ids: Tensor, *_: object) -> list[KernelCall]:
    if not (_is_plain(table) and _is_plain(ids) and _is_plain(output) and ids.dtype == torch.int64):
        raise UnknownOperationError("a look-up in what does not lie side by side")
    call = GatherCall(
        table.data_ptr(), ids.data_ptr(), output.data_ptr(), ids.numel(), table.shape[0],
        table.shape[1] * table.element_size(),
    )  # fmt: skip
    return [KernelCall(Routine.GATHER, call)]


_MAKERS: dict[Any, _Maker] = {
    _aten._to_copy.default: _copy,
    _aten.clone.default: _copy,
    _aten.neg.default: _unary(Operation.NEGATE),
    _aten.rsqrt.default: _unary(Operation.RECIPROCAL_ROOT),
    _aten.silu.default: _unary(Operation.SILU),
    _aten.pow.Tensor_Scalar: _power,
    _aten.add.Tensor: _binary(Operation.ADD),
    _aten.mul.Tensor: _binary(Operation.MULTIPLY),
    _aten.cat.default: _concatenation,
    _aten.mean.dim: _mean,
    _aten.embedding.default: _embedding,
}


def _is_plain(value: Tensor) -> bool:
    return value.is_contiguous()


def _pointwise(
    operation: Operation, output: Tensor, first: Tensor, second: Tensor | float | None = None
) -> KernelCall:
    tensors = [output, first, *([second] if isinstance(second, Tensor) else [])]
    if any(tensor.dim() == 0 and tensor.dtype != output.dtype for tensor in tensors):
        raise UnknownOperationError("a single number that torch rounds first")
    sizes, strides = _dimensions(output.shape, [_expanded(tensor, output.shape) for tensor in tensors])
    if len(strides) == 3 and strides[1][-1] == 0:  # sums and products are the same the other way round
        tensors[1:], strides[1:] = tensors[:0:-1], strides[:0:-1]
    if strides[0][-1] != 1 or strides[1][-1] != 1 or strides[-1][-1] not in {0, 1}:
        raise UnknownOperationError(f"{operation.name} of numbers that do not lie side by side")
    call = PointwiseCall(operation, (ctypes.c_int64 * DIMENSIONS)(*sizes))
    for place, tensor, steps in zip(("output", "first", "second"), tensors, strides, strict=False):
        setattr(call, place, _operand(operation, tensor, steps))
    if second is not None and not isinstance(second, Tensor):
        if float(torch.tensor(second, dtype=output.dtype)) != torch.tensor(second, dtype=torch.float32):
            raise UnknownOperationError(f"{second}, which torch rounds for some numbers and not for others")
        call.number = second
        address = ctypes.addressof(call) + PointwiseCall.number.offset
        call.second = Operand(address, kind_of(torch.float32))
    return KernelCall(Routine.POINTWISE, call)


def _operand(operation: Operation, tensor: Tensor, strides: list[int]) -> Operand:
    if tensor.dtype in DTYPES:
        kind = kind_of(tensor.dtype)
    elif tensor.dtype == torch.int64 and operation is Operation.COPY:
        kind = INT64_KIND
    else:
        raise UnknownOperationError(f"{operation.name} of {tensor.dtype}")
    return Operand(tensor.data_ptr(), kind, (ctypes.c_int64 * DIMENSIONS)(*strides))


def _expanded(tensor: Tensor, shape: torch.Size) -> list[int]:
    """Strides as broadcasting makes them."""
    try:
        return list(tensor.expand(shape).stride())
    except RuntimeError as error:
        raise UnknownOperationError(str(error)) from None


def _dimensions(
    shape: torch.Size, strides: list[tuple[int, ...] | list[int]]
) -> tuple[list[int], list[list[int]]]:
    """Merge adjacent dimensions where possible, and pad in front up to `DIMENSIONS`."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        steps = [each[dim] for each in strides]
        if sizes and all(step == so_far[0] * sizes[0] for step, so_far in zip(steps, kept, strict=True)):
            sizes[0] *= shape[dim]
            continue
        sizes.insert(0, shape[dim])
        for step, so_far in zip(steps, kept, strict=True):
            so_far.insert(0, step)
    if not sizes:  # a single number
        sizes, kept = [1], [[1] for _ in strides]
    if len(sizes) > DIMENSIONS:
        raise UnknownOperationError(f"{len(sizes)} dimensions")
    missing = DIMENSIONS - len(sizes)
    return [1] * missing + sizes, [[0] * missing + each for each in kept]


TorchCall = Callable[[], object]

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


def torch_call(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor, expected: Tensor
) -> TorchCall:
    """The cheapest call by which an operation of torch writes its result to `output`, with the bits of `expected`.

    It has run once when this returns.
    """
    for call in _candidates(target, arguments, named, output):
        output.zero_()
        try:
            call()
        except (TypeError, RuntimeError):
            continue
        if same(output, expected):
            return call
    copy = copied(target, arguments, named, (output,))
    copy()
    return copy


def _candidates(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
) -> list[TorchCall]:
    """Ways to have the operation write to `output`, the cheapest to call first."""
    if target in _COPIES:
        return [partial(output.copy_, arguments[0])]
    name = target._schema.name.partition("::")[2]
    found: list[TorchCall] = [
        partial(function, *arguments, **named, out=output)
        for function in (getattr(place, name, None) for place in (torch, torch._C._nn))
        if function is not None
    ]
    packet = getattr(torch.ops.aten, name)
    found += [partial(getattr(packet, overload), *arguments, **named, out=output)
              for overload in packet.overloads() if "out" in overload]  # fmt: skip
    return found


def copied(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], outputs: SequenceOf[Tensor]
) -> TorchCall:
    """A call for any operation: computes elsewhere, and copies to the outputs."""

    def call() -> None:
        results = target(*arguments, **named)
        for output, result in zip(
            outputs, (results,) if isinstance(results, Tensor) else results, strict=True
        ):
            output.copy_(result)

    return call


def same(results: Tensor, expected: Tensor) -> bool:
    """True if all numbers are equal; those that are none are equal to each other."""
    return results.shape == expected.shape and torch.equal(results.nan_to_num(), expected.nan_to_num())

"""Operations that torch computes in an execution plan, as calls that write their results to a given place."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch
from torch import Tensor

TorchCall = Callable[[], object]

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


def torch_call(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor, expected: Tensor
) -> TorchCall:
    """The cheapest call that writes an operation's result. It has run once when this returns.

    Args:
        target: the operation, one of torch's overloads.
        arguments: what it is called with.
        named: the same, by name.
        output: where the result goes.
        expected: the result, computed elsewhere; the call must give the same bits.
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

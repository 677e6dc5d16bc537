"""Linear layers whose weights lie in the order in which the kernel reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.native.calls import DTYPES
from tandem.engine.native.kernels import Kernels


class PackedLinear(nn.Linear):
    """A linear layer without its weight matrix: a packed copy takes its place.

    Weights that are bfloat16 numbers are packed as such whatever the layer computes in: nothing is lost, and reading
    them is what takes the time.
    """

    # Made from an existing layer, hence no constructor; see `pack_linears`.
    _kernels: Kernels
    _packed: Tensor
    _dtype: torch.dtype
    _float_bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """See `torch.nn.Linear`."""
        if input.dtype is not self._dtype:
            return nn.functional.linear(input, self.weight, self.bias)
        return self._kernels.linear(input, self._packed, self._float_bias, self.out_features)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in torch's class
        """The matrix, made anew; for whoever looks at it, not for computing."""
        return unpacked(self._packed, self.out_features, self.in_features).to(self._dtype)


def pack_linears(module: nn.Module, kernels: Kernels) -> int:
    """Packs every plain linear layer of a model on the CPU.

    Returns:
        How many there were.
    """
    count = 0
    for layer in module.modules():
        # Subclasses do more than multiply.
        if type(layer) is nn.Linear and layer.weight.dtype in DTYPES and not _is_hooked(layer):
            _pack_layer(layer, kernels)
            count += 1
    return count


def _pack_layer(layer: Any, kernels: Kernels) -> None:
    weight, bias = layer.weight.detach(), layer.bias
    del layer._parameters["weight"]
    layer.__class__ = PackedLinear
    layer._kernels = kernels
    layer._dtype = weight.dtype
    layer._packed = packed(weight, kernels.block)
    layer._float_bias = None if bias is None else bias.detach().float()


def _is_hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def packed(weight: Tensor, block: int) -> Tensor:
    """A matrix in the kernel's order.

    Args:
        weight: [outputs, inputs], float32 or bfloat16.
        block: how many outputs lie side by side; `Kernels.block`.

    Returns:
        float32 [blocks, inputs, block]; or bfloat16 [blocks, pairs of inputs, block, 2]. Missing outputs of the last
        block are zero, and so is the missing input of the last pair.
    """
    narrow = weight.bfloat16()
    is_narrow = weight.dtype == torch.bfloat16 or torch.equal(narrow.to(weight.dtype), weight)
    source = narrow if is_narrow else weight
    inputs = source.shape[1]
    source = nn.functional.pad(source, (0, 0, 0, -source.shape[0] % block))
    if is_narrow:
        even = nn.functional.pad(source, (0, inputs % 2))
        return even.view(-1, block, (inputs + 1) // 2, 2).transpose(1, 2).contiguous()
    return source.view(-1, block, inputs).transpose(1, 2).contiguous()


def unpacked(weights: Tensor, outputs: int, inputs: int) -> Tensor:
    """The matrix that was packed, [outputs, inputs]."""
    in_order = weights.transpose(1, 2)
    if weights.dtype == torch.bfloat16:
        return in_order.reshape(-1, 2 * weights.shape[1])[:outputs, :inputs]
    return in_order.reshape(-1, inputs)[:outputs]

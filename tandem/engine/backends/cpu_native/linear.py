"""Linear layers with weights in the order in which the kernel reads them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.engine.backends.cpu_native.library.calls import DTYPES
from tandem.engine.backends.cpu_native.library.kernels import Kernels

_INTO_RESIDUAL = frozenset(("o_proj", "down_proj"))
"""Names that most of transformers' decoders give the layers that add to the residual stream."""


class PackedLinear(nn.Linear):
    """A linear layer without its weight matrix: a packed copy takes its place.

    Weights that are bfloat16 numbers are packed as such, whatever the layer computes in: this loses nothing, and
    reading the weights takes most of the time.
    """

    # Made from an existing layer, hence no constructor; see `pack_linears`.
    _kernels: Kernels
    _packed: Tensor
    _dtype: torch.dtype
    _float_bias: Tensor | None
    _output_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        """See `torch.nn.Linear`."""
        if input.dtype is torch.float32 and self._dtype is torch.bfloat16:
            input = input.bfloat16()  # noqa: A001 - from a residual stream that is wider than the weights
        if input.dtype is not self._dtype:
            return nn.functional.linear(input, self.weight, self.bias)
        return self._kernels.linear(
            input, self._packed, self._float_bias, self.out_features, self._output_dtype
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in torch's class
        """The matrix, unpacked; for inspection, not for computing."""
        return unpacked(self._packed, self.out_features, self.in_features).to(self._dtype)


def pack_linears(module: nn.Module, kernels: Kernels, *, wide_residual: bool = False) -> int:
    """Packs every plain linear layer of a model on the CPU.

    The layer that makes the logits gives them in float32, as they were summed. Rounding them to bfloat16 would be most
    of a token's error: above 8 a bfloat16 is a multiple of 1/16.

    Args:
        module: is changed in place.
        kernels: multiply.
        wide_residual: layers that add to the residual stream give float32 as well, and so the stream is float32. Not
            every model's own code can do with that.

    Returns:
        Number of packed layers.
    """
    count = 0
    head = _head(module)
    for name, layer in module.named_modules():
        # Subclasses do more than multiply.
        if type(layer) is nn.Linear and layer.weight.dtype in DTYPES and not _is_hooked(layer):
            is_wide = layer is head or (wide_residual and name.rpartition(".")[2] in _INTO_RESIDUAL)
            _pack_layer(layer, kernels, torch.float32 if is_wide else layer.weight.dtype)
            count += 1
    return count


def _head(module: nn.Module) -> object:
    """The layer that computes a model's logits; None for a module without one."""
    return cast(Any, module).get_output_embeddings() if isinstance(module, PreTrainedModel) else None


def _pack_layer(layer: Any, kernels: Kernels, output_dtype: torch.dtype) -> None:
    weight, bias = layer.weight.detach(), layer.bias
    del layer._parameters["weight"]
    layer.__class__ = PackedLinear
    layer._kernels = kernels
    layer._dtype, layer._output_dtype = weight.dtype, output_dtype
    layer._packed = packed(weight, kernels.block)
    layer._float_bias = None if bias is None else bias.detach().float()


def unpack_linears(module: nn.Module) -> None:
    """Gives every packed layer its own matrix back, so that torch computes it again."""
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            _unpack_layer(layer)


def _unpack_layer(layer: Any) -> None:
    weight = layer.weight
    layer.__class__ = nn.Linear
    for name in ("_kernels", "_dtype", "_output_dtype", "_packed", "_float_bias"):
        delattr(layer, name)
    layer.weight = nn.Parameter(weight, requires_grad=False)


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

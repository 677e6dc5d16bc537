"""Replacements for a model's linear layers and attention: packed weights, and one kernel call a layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence as SequenceOf
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.engine.backends.cpu_native.library.kernels import (
    DTYPES,
    AttentionCall,
    KernelCall,
    Kernels,
    Routine,
    kind_of,
)
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import Scoring
from tandem.engine.steps import BranchStep, Packing

_INTO_RESIDUAL = frozenset(("o_proj", "down_proj"))
"""Names that most of transformers' decoders give the layers that add to the residual stream."""


tracing = threading.local()
"""Its `linear`, if there is one, stands for that of the kernels in a thread that traces a pass: others may run the same
layers meanwhile."""


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight matrix instead. Weights that are bfloat16 numbers are packed as
    such, whatever the layer computes in: this loses nothing, and reading the weights takes most of the time."""

    # Made from an existing layer, hence no constructor; see `pack_linears`.
    _kernels: Kernels
    _packed: Tensor
    _dtype: torch.dtype
    _float_bias: Tensor | None
    output_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        if input.dtype is torch.float32 and self._dtype is torch.bfloat16:
            input = input.bfloat16()  # noqa: A001 - from a residual stream that is wider than the weights
        if input.dtype is not self._dtype:
            return nn.functional.linear(input, self.weight, self.bias)
        linear = getattr(tracing, "linear", self._kernels.linear)
        return cast(
            Tensor, linear(input, self._packed, self._float_bias, self.out_features, self.output_dtype)
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in torch's class
        """The matrix, unpacked; for inspection, not for computing."""
        return unpacked(self._packed, self.out_features, self.in_features).to(self._dtype)


def pack_linears(module: nn.Module, kernels: Kernels, *, wide_residual: bool = False) -> int:
    """Packs every plain linear layer of a model on the CPU; returns their number.

    The layer that makes the logits gives them in float32, as they were summed. Rounding them to bfloat16 would be most
    of a token's error: above 8 a bfloat16 is a multiple of 1/16. With `wide_residual` layers that add to the residual
    stream give float32 as well, and so the stream is float32, which not every model's own code can do with.
    """
    count = 0
    head = cast(Any, module).get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    for name, layer in module.named_modules():
        # Subclasses do more than multiply.
        is_hooked = layer._forward_hooks or layer._forward_pre_hooks
        if type(layer) is nn.Linear and layer.weight.dtype in DTYPES and not is_hooked:
            is_wide = layer is head or (wide_residual and name.rpartition(".")[2] in _INTO_RESIDUAL)
            _pack_layer(layer, kernels, torch.float32 if is_wide else layer.weight.dtype)
            count += 1
    return count


def _pack_layer(layer: Any, kernels: Kernels, output_dtype: torch.dtype) -> None:
    weight = layer.weight.detach()
    bias = layer.bias
    del layer._parameters["weight"]
    layer.__class__ = PackedLinear
    layer._kernels = kernels
    layer._dtype = weight.dtype
    layer.output_dtype = output_dtype
    layer._packed = packed(weight, kernels.block)
    layer._float_bias = None if bias is None else bias.detach().float()


def unpack_linears(module: nn.Module) -> None:
    """Gives every packed layer its own matrix back, so that torch computes it again."""
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    for layer in layers:
        weight = layer.weight
        layer.__class__ = nn.Linear
        for name in ("_kernels", "_dtype", "output_dtype", "_packed", "_float_bias"):
            delattr(layer, name)
        layer.weight = nn.Parameter(weight, requires_grad=False)


_PACKED_AT_ONCE = 1 << 19
"""Numbers of a matrix that are packed in one go. A matrix of logits has hundreds of millions, and a few intermediate
copies of all of them would take more memory than the rest of the model."""


def packed(weight: Tensor, block: int) -> Tensor:
    """A matrix [outputs, inputs] in the kernel's order: float32 [blocks, inputs, block], or bfloat16 [blocks, pairs of
    inputs, block, 2]. Missing outputs of the last block are zero, and so is the missing input of the last pair."""
    outputs, inputs = weight.shape
    blocks_at_once = max(1, _PACKED_AT_ONCE // (block * inputs))
    parts = torch.split(weight, block * blocks_at_once)
    is_narrow = all(torch.equal(part.bfloat16().to(part.dtype), part) for part in parts)
    block_count = -(-outputs // block)
    if is_narrow:
        result = weight.new_empty((block_count, (inputs + 1) // 2, block, 2), dtype=torch.bfloat16)
    else:
        result = weight.new_empty((block_count, inputs, block))
    for part, place in zip(parts, torch.split(result, blocks_at_once), strict=True):
        rows = nn.functional.pad(part, (0, 0, 0, -part.shape[0] % block))
        if is_narrow:
            rows = nn.functional.pad(rows, (0, inputs % 2)).view(-1, block, (inputs + 1) // 2, 2)
        else:
            rows = rows.view(-1, block, inputs)
        place.copy_(rows.transpose(1, 2))
    return result


def unpacked(weights: Tensor, outputs: int, inputs: int) -> Tensor:
    """The matrix that was packed, [outputs, inputs]."""
    return weights.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs, :inputs]


WIDEST_SEGMENT = 128
"""Torch handles longer parts of a prompt: its kernels are made for many queries."""


class NativeAttention:
    """Geometry of an engine's layers, as attention needs it."""

    def __init__(self, kernels: Kernels, arena: KvArena) -> None:
        self.kernels = kernels
        self.arena = arena
        self.calls = [self.new_call(index) for index in range(len(arena.layers))]
        """The part of a call that is the same at each step, by layer."""

    def new_call(self, layer_index: int) -> AttentionCall:
        layer = self.arena.layers[layer_index]
        _, page_tokens, kv_heads, key_dim = layer.keys.shape
        return AttentionCall(
            keys=layer.keys.data_ptr(),
            values=layer.values.data_ptr(),
            page_tokens=page_tokens,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=layer.values.shape[3],
            window=layer.window or 0,
            kind=kind_of(layer.keys.dtype),
        )


def places(packing: Packing, group: int = 0) -> list[int]:
    """Places of a step's tokens in a group of layers, as the kernel reads them (`segments` in attention.h): page tables
    by address, so that the numbers are of use while these live."""
    are_branches = isinstance(packing.parts[0], BranchStep)
    numbers = [-len(packing.parts) if are_branches else len(packing.parts)]
    for part in packing.parts:
        table, start, end = part.span(group)
        numbers += (table.address, start, end - start)
        if isinstance(part, BranchStep):
            lengths = part.trunk_lengths
            numbers += (part.sequence.length, len(lengths), *lengths[: part.token_count])
    return numbers


def point(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, scoring: Scoring
) -> Tensor | None:
    """Sets the addresses of a call's inputs and output; shapes are those of `AttentionStep.attend`.

    The tensors must outlive the call, and so must the sinks that this returns. The numbers of a head are contiguous.
    """
    sinks = None if scoring.sinks is None else scoring.sinks.float()
    call.query = query.data_ptr()
    call.key = key.data_ptr()
    call.value = value.data_ptr()
    _, call.query_head, call.query_token, _ = query.stride()
    _, call.key_head, call.key_token, _ = key.stride()
    _, call.value_head, call.value_token, _ = value.stride()
    call.heads = query.shape[1]
    call.sinks = None if sinks is None else sinks.data_ptr()
    call.scale = query.shape[3] ** -0.5 if scoring.scale is None else scoring.scale
    call.softcap = scoring.softcap or 0.0
    call.output = output.data_ptr()
    call.threads = torch.get_num_threads()
    return sinks


class NativeLayout(Packing):
    """A step as the kernel sees it: no mask, no padding, no grouping."""

    def __init__(self, segments: SequenceOf[Segment], attention: NativeAttention) -> None:
        super().__init__(segments)
        self._attention = attention
        self._places = torch.tensor([places(self, group) for group in range(attention.arena.group_count)])

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        call = self._attention.calls[layer_index]
        # The kernel reads a head's numbers from consecutive places; all models but the odd one lay them so.
        query, key, value = (
            states if states.stride(3) == 1 else states.contiguous() for states in (query, key, value)
        )
        output = query.new_empty((1, self.token_count, query.shape[1], value.shape[3]))
        _sinks = point(call, query, key, value, output, scoring)  # alive until the call has run
        call.segments = self._places[self._attention.arena.layers[layer_index].group].data_ptr()
        self._attention.kernels.run(KernelCall(Routine.ATTEND, call))
        return output

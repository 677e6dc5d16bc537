"""One step whose attention is a single call of the kernel for each layer, whatever the sequences' lengths."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor, nn

from tandem.engine.backends.branches import BranchPacking
from tandem.engine.backends.cpu_native.library.calls import AttentionCall, kind_of
from tandem.engine.backends.cpu_native.library.kernels import Kernels, attention_call
from tandem.engine.backends.packing import Packing
from tandem.engine.kv_cache.arena import KvArena, LayerCache, LayerGeometry
from tandem.engine.kv_cache.sequence import Segment

WIDEST_SEGMENT = 128
"""Torch handles longer parts of a prompt: its kernels are made for many queries."""


class NativeAttention:
    """Geometry of an engine's layers, as attention needs it."""

    def __init__(self, kernels: Kernels, arena: KvArena, geometry: tuple[LayerGeometry, ...]) -> None:
        self.kernels = kernels
        self._layers = list(zip(arena.layers, geometry, strict=True))
        self.group_count = arena.group_count
        """Page tables of a sequence."""
        self.calls = [_layer_call(layer, shape) for layer, shape in self._layers]
        """The part of a call that is the same at each step, by layer."""

    def new_call(self, layer_index: int) -> AttentionCall:
        """A call of a layer that shares nothing with `calls`."""
        return _layer_call(*self._layers[layer_index])

    def group_of(self, layer_index: int) -> int:
        """Which of them says where a layer's keys and values lie."""
        return self._layers[layer_index][0].group

    @staticmethod
    def suits(segments: SequenceOf[Segment]) -> bool:
        """True if the kernel is faster than torch for a step of these segments."""
        return all(segment.token_count <= WIDEST_SEGMENT for segment in segments)


def _layer_call(layer: LayerCache, shape: LayerGeometry) -> AttentionCall:
    return AttentionCall(
        keys=layer.keys.data_ptr(),
        values=layer.values.data_ptr(),
        page_tokens=layer.keys.shape[1],
        kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        window=shape.window or 0,
        kind=kind_of(layer.keys.dtype),
    )


def places(packing: Packing, group: int = 0) -> list[int]:
    """Where a step's tokens belong in a group of layers, as the kernel reads it (`segments` in attention.h).

    The numbers name the sequences' page tables by address: they are of use while these live.
    """
    if isinstance(packing, BranchPacking):
        numbers = [-len(packing.parts)]
        for part in packing.parts:
            sequence, lengths = part.sequence, part.step.trunk_lengths
            numbers += (
                sequence.tables[group].address,
                part.written,
                part.count,
                sequence.length,
                len(lengths),
            )
            numbers += lengths[: part.count]
        return numbers
    segments = packing.segments
    numbers = [len(segments)]
    for segment in segments:
        numbers += (segment.sequence.tables[group].address, segment.start, segment.token_count)
    return numbers


def point(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> None:
    """Sets the addresses of a call's inputs and output; shapes are those of `AttentionStep.attend`.

    The tensors must outlive the call. `sinks` are float32, and the numbers of a head are contiguous.
    """
    call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    _, call.query_head, call.query_token, _ = query.stride()
    _, call.key_head, call.key_token, _ = key.stride()
    _, call.value_head, call.value_token, _ = value.stride()
    call.heads = query.shape[1]
    call.sinks = None if sinks is None else sinks.data_ptr()
    call.scale = query.shape[3] ** -0.5 if scale is None else scale
    call.softcap = softcap or 0.0
    call.output, call.threads = output.data_ptr(), torch.get_num_threads()


def rows_of(states: Tensor) -> Tensor:
    """The kernel reads a head's numbers from consecutive places; all models but the odd one lay them so."""
    return states if states.stride(3) == 1 else states.contiguous()


class NativeLayout(Packing):
    """A step as the kernel sees it: no mask, no padding, no grouping."""

    def __init__(self, segments: SequenceOf[Segment], attention: NativeAttention) -> None:
        super().__init__(segments)
        self._attention = attention
        self._token_count = self.token_count
        self._places = torch.tensor([places(self, group) for group in range(attention.group_count)])

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        call = self._attention.calls[layer_index]
        query, key, value = rows_of(query), rows_of(key), rows_of(value)
        output = query.new_empty((1, self._token_count, query.shape[1], value.shape[3]))
        floats = None if sinks is None else sinks.float()
        point(call, query, key, value, output, sinks=floats, scale=scale, softcap=softcap)
        call.segments = self._places[self._attention.group_of(layer_index)].data_ptr()
        self._attention.kernels.run(attention_call(call))
        return output

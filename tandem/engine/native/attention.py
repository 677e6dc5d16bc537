"""One step whose attention is a single call of the kernel for each layer, whatever the sequences' lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tandem.engine.cache import KvArena, LayerGeometry
from tandem.engine.layout import Packing
from tandem.engine.native.kernels import AttentionCall, Kernels, kind_of
from tandem.engine.segment import Segment

WIDEST_SEGMENT = 32
"""Longer parts of a prompt are left to torch, whose kernels are made for many queries."""


class NativeAttention:
    """The part of a call that is the same at each step, layer by layer."""

    def __init__(self, kernels: Kernels, arena: KvArena, geometry: tuple[LayerGeometry, ...]) -> None:
        self.kernels = kernels
        self.calls = [
            AttentionCall(
                keys=layer.keys.data_ptr(),
                values=layer.values.data_ptr(),
                total_tokens=layer.keys.shape[2],
                kv_heads=shape.kv_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                window=shape.window or 0,
                kind=kind_of(layer.keys.dtype),
            )
            for layer, shape in zip(arena.layers, geometry, strict=True)
        ]

    @staticmethod
    def suits(segments: list[Segment]) -> bool:
        """Whether the kernel is the faster way for a step of these segments."""
        return all(segment.token_count <= WIDEST_SEGMENT for segment in segments)


class NativeLayout(Packing):
    """A step as the kernel sees it: no mask, no padding, no grouping."""

    def __init__(self, segments: list[Segment], attention: NativeAttention) -> None:
        super().__init__(segments)
        self._attention = attention
        self._threads = torch.get_num_threads()
        self._token_count = self.token_count
        self._places = torch.tensor(
            [(segment.sequence.extent.start, segment.start, segment.token_count) for segment in segments]
        )

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
        query, key, value = _rows(query), _rows(key), _rows(value)
        heads = query.shape[1]
        output = query.new_empty((1, self._token_count, heads, value.shape[3]))
        floats = None if sinks is None else sinks.float()
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        _, call.query_head, call.query_token, _ = query.stride()
        _, call.key_head, call.key_token, _ = key.stride()
        _, call.value_head, call.value_token, _ = value.stride()
        call.heads = heads
        call.segments, call.segment_count = self._places.data_ptr(), len(self.segments)
        call.sinks = None if floats is None else floats.data_ptr()
        call.scale = query.shape[3] ** -0.5 if scale is None else scale
        call.softcap = softcap or 0.0
        call.output, call.threads = output.data_ptr(), self._threads
        self._attention.kernels.attend(call)
        return output


def _rows(states: Tensor) -> Tensor:
    """The kernel reads a head's numbers from consecutive places; all models but the odd one lay them so."""
    return states if states.stride(3) == 1 else states.contiguous()

"""A step of fixed shape with all inputs in one tensor, so that it can be captured once and replayed."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.segment import Segment
from tandem.engine.models.attention import STEP_ARGUMENT, grouped_attention
from tandem.engine.models.loading import LoadedModel

NUMBERS_PER_SEQUENCE = 3
"""Start of its extent, number of computed tokens, and number of tokens to compute."""


class StaticStep:
    """The layout of a step whose shape is a bucket's; `StepLayout` is for any shape.

    The device computes the positions of keys and the mask from a few numbers per sequence. Keys are gathered from the
    arena, since a graph cannot hold views with changing starts. Padding writes to the arena's spare token and sees only
    that, or the first token of its own sequence; nothing reads its results.
    """

    def __init__(self, model: LoadedModel, arena: KvArena, bucket: Bucket) -> None:
        self.bucket = bucket
        self._model = model
        self._arena = arena
        self._module: Any = model.module
        self._write_index = torch.empty(0)
        self._key_index = torch.empty(0)
        self._positions = torch.empty(0)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def logits(self, token_ids: Tensor, bases: Tensor, starts: Tensor, widths: Tensor) -> Tensor:
        """One forward pass; keys and values are then in the arena. No value is looked at on the host.

        Args:
            token_ids: [sequences, width], int64; each sequence's tokens first, then any.
            bases: [sequences], int64, where the extents start.
            starts: [sequences], int64, tokens whose keys and values are in the arena.
            widths: [sequences], int64, tokens that follow; 0 for a sequence that is padding.

        Returns:
            [sequences * width, vocabulary_size] in the model's dtype.
        """
        device, bucket = token_ids.device, self.bucket
        offsets = torch.arange(bucket.width, device=device)[None]
        is_real = offsets < widths[:, None]
        self._positions = torch.where(is_real, starts[:, None] + offsets, 0)
        spare = self._arena.total_tokens
        self._write_index = torch.where(is_real, bases[:, None] + self._positions, spare).flatten()
        keys = torch.arange(bucket.length, device=device)[None]
        is_there = keys < (starts + widths)[:, None]
        self._key_index = torch.where(is_there, bases[:, None] + keys, spare).flatten()
        self._masks.clear()
        output = self._module(
            input_ids=token_ids.view(1, -1),
            position_ids=self._positions.view(1, -1),
            use_cache=False,
            **{STEP_ARGUMENT: self},
        )
        logits: Tensor = output.logits[0]
        return logits

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
        """See `AttentionStep.attend`. What is seen of the past is known from the layer; there is no `mask`."""
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        geometry, layer = self._model.layers[layer_index], self._arena.layers[layer_index]
        layer.keys.index_copy_(2, self._write_index, key)
        layer.values.index_copy_(2, self._write_index, value)
        count, width, heads = self.bucket.sequences, self.bucket.width, query.shape[1]
        repeats = heads // geometry.kv_heads
        block = query.view(heads, count, width, -1).transpose(0, 1)
        if sinks is not None:
            sinks = sinks.view(geometry.kv_heads, repeats).repeat_interleave(width, dim=1)
        output = grouped_attention(
            block.reshape(count, geometry.kv_heads, repeats * width, -1),
            self._gathered(layer.keys),
            self._gathered(layer.values),
            mask=self._mask(geometry.window, repeats),
            is_causal=False,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        return output.reshape(count, heads, width, -1).transpose(1, 2).reshape(1, count * width, heads, -1)

    def _gathered(self, storage: Tensor) -> Tensor:
        """Each sequence's keys or values, [sequences, kv_heads, length, dim]."""
        heads = storage.shape[1]
        found = storage[0].index_select(1, self._key_index)
        return found.view(heads, self.bucket.sequences, self.bucket.length, -1).transpose(0, 1)

    def _mask(self, window: int | None, repeats: int) -> Tensor:
        """Zero where a token sees a key and minus infinity elsewhere, [sequences, 1, repeats * width, length]."""
        if (window, repeats) not in self._masks:
            queries = self._positions[:, None, :, None]
            keys = torch.arange(self.bucket.length, device=queries.device)
            hidden = keys > queries
            if window is not None:
                hidden = hidden | (keys <= queries - window)
            mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=queries.device)
            mask = mask.masked_fill(hidden, float("-inf"))
            self._masks[window, repeats] = mask.repeat(1, 1, repeats, 1) if repeats > 1 else mask
        return self._masks[window, repeats]


class StaticInputs:
    """The numbers that a recorded step starts from, in one tensor on the device: one copy sets them all."""

    def __init__(self, bucket: Bucket, extra: int, device: torch.device) -> None:
        """Args:
        bucket: the shape of the step.
        extra: further numbers, for graphs that contain more than the step.
        device: where the step runs.
        """
        self._bucket = bucket
        self._sizes = (
            bucket.token_count, *(bucket.sequences,) * NUMBERS_PER_SEQUENCE, extra,
        )  # fmt: skip
        self._on_device = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._on_host = torch.zeros(sum(self._sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        token_ids, self.bases, self.starts, self.widths, self.extra = torch.split(
            self._on_device, list(self._sizes)
        )
        self.token_ids = token_ids.view(bucket.sequences, bucket.width)

    def fill(self, segments: SequenceOf[Segment], extra: SequenceOf[int], spare: int) -> None:
        """Set the numbers for these segments; the rest of the bucket becomes padding at the arena's spare token."""
        bucket = self._bucket
        missing = bucket.sequences - len(segments)
        numbers: list[int] = []
        for segment in segments:
            token_ids = segment.token_ids()
            numbers += token_ids + [0] * (bucket.width - len(token_ids))
        numbers += [0] * (missing * bucket.width)
        numbers += [segment.sequence.extent.start for segment in segments] + [spare] * missing
        numbers += [segment.start for segment in segments] + [0] * missing
        numbers += [segment.token_count for segment in segments] + [0] * missing
        numbers += [*extra, *[0] * (self._sizes[-1] - len(extra))]
        # The last step's copy is over: its result was read.
        self._on_host.copy_(torch.tensor(numbers))
        self._on_device.copy_(self._on_host, non_blocking=True)

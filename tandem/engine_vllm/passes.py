"""Forward passes behind a step of vLLM's model runner V1, of one token of each sequence, which the device knows and the
host does not.

`execute_model` takes tokens from the host. Here the batch stays as the last step has left it, and one token longer with
each pass: positions, lengths and places in the cache are counted on where they lie on the device, in the runner's own
buffers, which its CUDA graphs read. The host only counts along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tandem.engine.rows import to_device

_NOWHERE = -1
"""vLLM's place for keys and values that nobody keeps."""


class Passes:
    """The passes behind one step."""

    def __init__(self, runner: Any, ends: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """
        Args:
            ends: Length of each of the step's sequences, by its name.
            counts: Tokens that are drawn behind those for which any are; all but the last are run.
        """
        self._runner = runner
        names = list(runner.input_batch.req_ids)
        self._size = len(names)
        drafted = [names.index(name) for name in counts]
        lengths = np.array([ends[name] for name in names], dtype=np.int64)
        grows = np.zeros((max(counts.values()) - 1, self._size), dtype=np.int64)
        for place, count in zip(drafted, counts.values(), strict=True):
            grows[: count - 1, place] = 1
        self._host_lengths = lengths.copy()
        self._host_grows = grows
        self._device = runner.input_ids.gpu.device
        given = to_device([np.array(drafted, dtype=np.int64), lengths, grows], self._device)
        self._drafted, self._lengths, self._grows = given
        self._starts = torch.arange(self._size + 1, dtype=torch.int32, device=self._device)
        self._depth = 0

    def run(self, token_ids: Tensor | None) -> Tensor | None:
        """Run one more token of each sequence; the logits behind those of the drafted ones, [drafted, vocabulary_size],
        on ranks that have them.

        Args:
            token_ids: int64 [drafted], on the first rank. Of one that has none the pass is of no use.
        """
        from vllm.forward_context import set_forward_context

        runner = self._runner
        size = self._size
        tokens = to_all_ranks(token_ids, self._drafted).clamp(min=0)
        runner.input_ids.gpu[:size].index_copy_(0, self._drafted, tokens.to(runner.input_ids.gpu.dtype))
        grows = self._grows[self._depth]
        self._lengths += grows
        self._host_lengths = self._host_lengths + self._host_grows[self._depth]
        self._depth += 1
        runner.positions[:size] = self._lengths - 1
        runner.seq_lens[:size] = self._lengths
        mode, shape, _, across, _ = runner._determine_batch_execution_and_padding(
            num_tokens=size,
            num_reqs=size,
            num_scheduled_tokens_np=np.ones(size, dtype=np.int32),
            max_num_scheduled_tokens=1,
        )
        width = shape.num_tokens
        runner.positions[size:width].zero_()
        with self._batch_of_single_tokens():
            self._find_places(grows == 0)
            slots, metadata = self._metadata(mode, shape)
            with set_forward_context(
                metadata,
                runner.vllm_config,
                num_tokens=width,
                num_tokens_across_dp=across,
                cudagraph_runtime_mode=mode,
                batch_descriptor=shape,
                slot_mapping=slots,
                is_padding=runner._prepare_padding_mask(size, width),
            ):
                hidden = runner._model_forward(
                    input_ids=runner.input_ids.gpu[:width],
                    positions=runner.positions[:width],
                    **runner._init_model_kwargs(),
                )
        return cast("Tensor | None", runner.model.compute_logits(hidden[self._drafted]))

    @contextmanager
    def _batch_of_single_tokens(self) -> Iterator[None]:
        """Give the runner other memory on the host for the counts of this pass: copies of the last ones may still be on
        their way to the device."""
        runner = self._runner
        starts = runner.query_start_loc
        lengths = runner.optimistic_seq_lens_cpu
        starts.gpu[: self._size + 1] = self._starts
        starts.gpu[self._size + 1 :] = self._size
        counted = np.full(len(starts.gpu), self._size, dtype=np.int32)
        counted[: self._size + 1] = np.arange(self._size + 1)
        own_lengths = torch.zeros_like(lengths)
        own_lengths[: self._size] = torch.from_numpy(self._host_lengths)
        runner.query_start_loc = SimpleNamespace(gpu=starts.gpu, cpu=torch.from_numpy(counted), np=counted)
        runner.optimistic_seq_lens_cpu = own_lengths
        try:
            yield
        finally:
            runner.query_start_loc = starts
            runner.optimistic_seq_lens_cpu = lengths

    def _find_places(self, rests: Tensor) -> None:
        """Compute where this pass writes keys and values: nowhere for sequences that rest, bool [size]."""
        size = self._size
        tables = self._runner.input_batch.block_table
        tables.compute_slot_mapping(size, self._starts, self._runner.positions[:size])
        for table in tables.block_tables:
            table.slot_mapping.gpu[:size].masked_fill_(rests, _NOWHERE)

    def _metadata(self, mode: Any, shape: Any) -> tuple[Any, Any]:
        """Places of keys and values by layer, and what attention reads, as `execute_model` makes them."""
        from vllm.config import CUDAGraphMode

        runner = self._runner
        size = self._size
        is_full = mode == CUDAGraphMode.FULL
        width = shape.num_tokens
        sequences = size if shape.num_reqs is None else shape.num_reqs
        writes_apart = not all(
            group.backend.forward_includes_kv_cache_update
            for groups in runner.attn_groups
            for group in groups
        )
        is_padded = is_full or writes_apart
        by_group, by_layer = runner._get_slot_mappings(
            num_tokens_padded=width if is_padded else size,
            num_reqs_padded=sequences if is_padded else size,
            num_tokens_unpadded=size,
        )
        metadata, _ = runner._build_attention_metadata(
            num_tokens=size,
            num_tokens_padded=width if is_full else None,
            num_reqs=size,
            num_reqs_padded=sequences if is_full else None,
            max_query_len=1,
            num_scheduled_tokens=dict.fromkeys(runner.input_batch.req_ids, 1),
            slot_mappings=by_group,
        )
        return by_layer, metadata


def to_all_ranks(token_ids: Tensor | None, like: Tensor) -> Tensor:
    """The first rank's tokens, on all of them."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    own = torch.empty_like(like) if token_ids is None else token_ids
    return own if group.world_size == 1 else cast("Tensor", group.broadcast(own, src=0))

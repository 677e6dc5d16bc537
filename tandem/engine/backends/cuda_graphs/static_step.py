"""A step of fixed shape, so that it can be captured once and replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.paged.attention import paged_attention
from tandem.engine.backends.paged.pages import PageWriter
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.scoring import Scoring
from tandem.engine.backends.paged.varlen import varlen_for
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.models.attention import STEP_ARGUMENT
from tandem.engine.models.loading import LoadedModel


class StaticStep:
    """The layout of a step whose shape is a bucket's; `StepLayout` is for any shape.

    The device computes where keys and values go and what is seen from a few numbers per sequence and the page tables.
    Padding writes to the arena's spare page, which nobody reads: a sequence that is padding has no keys, and padding
    behind a sequence's tokens sees that sequence's keys at most. So whatever padding computes stays with it.
    """

    def __init__(self, model: LoadedModel, arena: KvArena, bucket: Bucket, max_length: int) -> None:
        self.bucket = bucket
        self._model = model
        self._arena = arena
        self._max_length = max_length
        self._module: Any = model.module
        self._writers: list[PageWriter] = []
        self._queries: list[PagedQueries] = []
        for layer in arena.layers:
            varlen_for(layer.keys, layer.padded_values)  # tried now: a capture must not hold the trial

    def logits(self, token_ids: Tensor, page_tables: Tensor, starts: Tensor, widths: Tensor) -> Tensor:
        """One forward pass; keys and values are then in the arena. No value is looked at on the host.

        Args:
            token_ids: [sequences, width], int64; each sequence's tokens first, then any.
            page_tables: [groups of layers, sequences, max_pages], int32, with room for what is written.
            starts: [sequences], int64, tokens whose keys and values are in the arena.
            widths: [sequences], int64, tokens that follow; 0 for a sequence that is padding.

        Returns:
            [sequences * width, vocabulary_size] in the model's dtype.
        """
        positions = self._lay_out(page_tables, starts, widths)
        output = self._module(
            input_ids=token_ids.view(1, -1),
            position_ids=positions.view(1, -1),
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
        self._writers[layer.group].write(layer, key, value)
        scoring = Scoring(geometry.window, scale, softcap, sinks)
        return paged_attention(query[0].transpose(0, 1), layer, self._queries[layer.group], scoring)[None]

    def _lay_out(self, page_tables: Tensor, starts: Tensor, widths: Tensor) -> Tensor:
        """Sets what all layers share and returns the tokens' positions, [sequences, width]."""
        device, bucket, page_tokens = starts.device, self.bucket, self._arena.page_tokens
        offsets = torch.arange(bucket.width, device=device)
        is_real = offsets < widths[:, None]
        positions = torch.where(is_real, starts[:, None] + offsets, 0)
        columns, places = positions // page_tokens, (positions % page_tokens).flatten()
        lengths = torch.where(widths > 0, starts + widths, 0).int()
        query_starts = torch.arange(bucket.sequences + 1, dtype=torch.int32, device=device) * bucket.width
        counts = widths.int() if bucket.width > 1 else None
        self._writers, self._queries = [], []
        for table in page_tables.unbind():
            pages = torch.where(is_real, table.gather(1, columns).long(), self._arena.spare_page).flatten()
            self._writers.append(PageWriter(pages, places))
            self._queries.append(
                PagedQueries(table, query_starts, lengths, bucket.width, self._max_length, counts)
            )
        return positions

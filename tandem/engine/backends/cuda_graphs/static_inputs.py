"""The numbers that a captured step starts from, in one tensor on the device: one copy sets them all."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.kv_cache.arena import page_tokens_on, pages_for
from tandem.engine.kv_cache.sequence import Segment


class Transfer(Protocol):
    """Copies one host buffer to the device, again and again."""

    def start(self, target: Tensor, source: Tensor) -> None:
        """Queues the copy behind the device's work so far."""
        ...

    def wait(self) -> None:
        """Returns when the last copy has read the host buffer, which may then be filled again."""
        ...


class _CudaTransfer:
    """Returns before the copy has run, as pinned memory allows: the engine goes on while the device works."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, target: Tensor, source: Tensor) -> None:
        """See `Transfer`."""
        target.copy_(source, non_blocking=True)
        self._read.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """See `Transfer`."""
        self._read.synchronize()


class _PlainTransfer:
    def start(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait(self) -> None:
        pass


def transfer_to(device: torch.device) -> Transfer:
    """The transfer of a device."""
    return _CudaTransfer(device) if device.type == "cuda" else _PlainTransfer()


class StaticInputs:
    """Token ids, places and page tables of a bucket's sequences."""

    def __init__(
        self,
        bucket: Bucket,
        max_length: int,
        extra: int,
        device: torch.device,
        group_count: int = 1,
        transfer: Transfer | None = None,
    ) -> None:
        """Args:
        bucket: the shape of the step.
        max_length: the longest sequence, which the page tables have room for.
        extra: further numbers, for graphs that contain more than the step.
        device: where the step runs.
        group_count: groups of layers, for each of which a sequence has a page table.
        transfer: None for the device's own.
        """
        self._bucket = bucket
        self._transfer = transfer or transfer_to(device)
        count, self._table_width = bucket.sequences, pages_for(max_length, page_tokens_on(device))
        table_size = group_count * count * self._table_width
        self._sizes = [bucket.token_count, count, count, extra, pages_for(table_size, 2)]
        self._on_device = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._on_host = torch.zeros(sum(self._sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        token_ids, self.starts, self.widths, self.extra, table = torch.split(self._on_device, self._sizes)
        self.token_ids = token_ids.view(count, bucket.width)
        """[sequences, width], int64; each sequence's tokens first, then any."""
        # Page numbers are int32, as attention takes them: two in a place.
        table_shape = group_count, count, self._table_width
        self.page_tables = table.view(torch.int32)[:table_size].view(table_shape)
        """[groups of layers, sequences, max_pages], int32."""
        parts = [part.numpy() for part in torch.split(self._on_host, self._sizes)]
        self._token_ids, self._starts, self._widths, self._extra = parts[:4]
        self._pages = parts[4].view(np.int32)[:table_size].reshape(table_shape)

    def fill(self, segments: SequenceOf[Segment], extra: SequenceOf[int], spare_page: int) -> None:
        """Sets the numbers for these segments; the rest of the bucket becomes padding, at the arena's spare page."""
        # A step without rows returns before the device has read its numbers.
        self._transfer.wait()
        bucket = self._bucket
        token_ids = self._token_ids.reshape(bucket.sequences, bucket.width)
        self._on_host.zero_()
        self._pages[:] = spare_page
        for index, segment in enumerate(segments):
            token_ids[index, : segment.token_count] = segment.token_ids()
            self._starts[index], self._widths[index] = segment.start, segment.token_count
            for own, table in zip(self._pages, segment.sequence.tables, strict=True):
                pages = table.pages[: self._table_width]
                own[index, : len(pages)] = pages
        self._extra[: len(extra)] = extra
        self._transfer.start(self._on_device, self._on_host)

"""The numbers of a captured step reach the device whole, however late the device is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.cuda_graphs.static_inputs import StaticInputs
from tandem.engine.kv_cache.arena import PageTable
from tandem.engine.kv_cache.sequence import Segment, Sequence

CPU = torch.device("cpu")
SPARE = 9


def segment(token_ids: list[int], computed: int, pages: list[int]) -> Segment:
    sequence = Sequence(PageTable(64, 256, pages), 256, 100)
    sequence.token_ids = token_ids
    sequence.advance(computed)
    return Segment(sequence, len(token_ids) - computed)


class LaggingDevice:
    """Runs what is queued only when the host waits for it."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []
        self.waits = 0

    def start(self, target: Tensor, source: Tensor) -> None:
        self.queued.append(lambda: target.copy_(source))

    def wait(self) -> None:
        self.waits += 1
        while self.queued:
            self.queued.pop(0)()


def test_the_host_buffer_is_not_filled_before_the_device_has_read_it() -> None:
    """A step without rows reads no result, so the host is soon at the next step."""
    device, seen = LaggingDevice(), []
    inputs = StaticInputs(Bucket(1, 2), 256, 0, CPU, transfer=device)
    for step in range(3):
        inputs.fill([segment([step, step + 10], 0, [step])], [], SPARE)
        device.queued.append(lambda: seen.append(inputs.token_ids.flatten().tolist()))
    device.wait()
    assert seen == [[0, 10], [1, 11], [2, 12]]


def test_the_rest_of_a_bucket_is_padding_at_the_spare_page() -> None:
    inputs = StaticInputs(Bucket(3, 2), 200, 5, CPU)
    inputs.fill([segment([1] * 8, 7, [4, 3, 2, 1])], [6, 7, 8], SPARE)
    inputs.fill([segment([5, 6, 7], 1, [2]), segment([8], 0, [3])], [1, 2], SPARE)
    assert inputs.token_ids.tolist() == [[6, 7], [8, 0], [0, 0]]
    assert inputs.starts.tolist() == [1, 0, 0]
    assert inputs.widths.tolist() == [2, 1, 0]
    assert inputs.extra.tolist() == [1, 2, 0, 0, 0]
    assert inputs.page_tables.dtype == torch.int32
    assert inputs.page_tables.tolist() == [[[2, SPARE, SPARE, SPARE], [3, SPARE, SPARE, SPARE], [SPARE] * 4]]


def test_a_table_longer_than_the_longest_sequence_is_cut() -> None:
    """For branches a sequence may hold room behind its end."""
    inputs = StaticInputs(Bucket(1, 1), 64, 0, CPU)
    inputs.fill([segment([5], 0, [2, 7])], [], SPARE)
    assert inputs.page_tables.tolist() == [[[2]]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_reads_each_buffer_once() -> None:
    inputs = StaticInputs(Bucket(4, 4), 4096, 0, torch.device("cuda", torch.cuda.device_count() - 1))
    seen = []
    for step in range(20):
        inputs.fill([segment([step] * 4, 0, [step])], [], SPARE)
        seen.append(inputs.token_ids[0, 0].clone())
    assert [int(found) for found in seen] == list(range(20))

"""Rows are made in chunks, bit by bit the same, and the memory that they take meanwhile has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.engine.interface import RowRequest
from tandem.engine.rows import ROW_ARRAYS, verifications
from tests.unit.engine.test_rows import ASKED

WIDTH = 4096
"""Of a vocabulary beside which the other numbers are few."""
BYTES = 8
"""Of a number in float64."""
COPIES = 12


class MemoryPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors had together, of those that were made meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        }
        found = func(*args, **(kwargs or {}))
        self._live = {
            key: own
            for key, own in self._live.items()
            if not own[0].expired()  # type: ignore[no-untyped-call]
        }
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                own = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[storage._cdata] = own, storage.nbytes()
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return found


def many(kind: str) -> list[RowRequest]:
    asked = [*ASKED.values()] if kind == "all" else [ASKED[kind]]
    return asked * COPIES


def measured(requests: Sequence[RowRequest], chunk_values: int | None) -> tuple[str, int]:
    logits = torch.randn(3 * len(requests), WIDTH, generator=torch.Generator().manual_seed(0)) * 3
    with torch.inference_mode(), MemoryPeak() as peak:
        found = verifications(requests, logits, chunk_values=chunk_values)
    return repr(found), peak.bytes


@pytest.mark.parametrize("kind", [*ASKED, "all"])
def test_chunks_have_the_same_bits_in_bounded_memory(kind: str) -> None:
    """Two requests at a time; whole rows that are the answer come on top."""
    requests = many(kind)
    values = 2 * 3 * WIDTH
    expected, whole = measured(requests, None)
    found, peak = measured(requests, values)
    assert found == expected
    answers = 4 * WIDTH * sum(3 for each in requests if each is ASKED["dense"])
    assert peak <= ROW_ARRAYS * BYTES * values + answers
    if whole > 2 * (BYTES * values + answers):
        assert peak < whole / 2

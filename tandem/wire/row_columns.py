"""TargetService: token and support rows as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat

import numpy as np

from tandem.errors import ProtocolError
from tandem.types import (
    Float32Array,
    FloatArray,
    IntArray,
    RowKind,
    RowStatistics,
    StepCost,
    SupportRow,
    TargetRow,
    TokenRow,
    VerifyStep,
)
from tandem.v1.target_pb2 import RowColumns
from tandem.wire.columns import ints_from_bytes, ints_to_bytes, sizes_from_bytes
from tandem.wire.common import floats_from_bytes, floats_to_bytes

_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)


def columns_to_proto(rows: Sequence[TargetRow]) -> RowColumns | None:
    """The rows of one sequence as columns; None for rows that are none of one form: dense ones, or none at all."""
    tokens = [row.token_id for row in rows if isinstance(row, TokenRow)]
    supports = [row for row in rows if isinstance(row, SupportRow)]
    if not rows or len(rows) not in (len(tokens), len(supports)):
        return None
    if tokens:
        return RowColumns(token_ids=ints_to_bytes(tokens))
    statistics = [row.statistics for row in supports if row.statistics is not None]
    outside_probs = [row.outside_prob for row in supports if row.outside_prob is not None]
    if not {len(statistics), len(outside_probs)} <= {0, len(rows)}:
        return None
    columns = RowColumns(
        support_sizes=ints_to_bytes([len(row.probs) for row in supports]),
        probabilities=floats_to_bytes(np.concatenate([row.probs for row in supports])),
        outside_masses=_floats([row.outside_mass for row in supports]),
        outside_token_ids=ints_to_bytes([row.outside_token_id for row in supports]),
        outside_probabilities=_floats(outside_probs),
    )
    if statistics:
        columns.entropies = _floats([each.entropy for each in statistics])
        columns.max_probabilities = _floats([each.max_prob for each in statistics])
        columns.argmax_token_ids = ints_to_bytes([each.argmax_token_id for each in statistics])
        columns.ranks = np.concatenate([each.ranks for each in statistics]).astype("<i4").tobytes()
        columns.logits = floats_to_bytes(np.concatenate([each.logits for each in statistics]))
    return columns


def form(columns: RowColumns) -> tuple[bool, bool, bool]:
    """Which columns there are. Only columns of the same form can be joined."""
    return bool(columns.token_ids), bool(columns.outside_probabilities), bool(columns.entropies)


class RowBlock:
    """The rows of one message, those of all its sequences."""

    def __init__(self, message: RowColumns) -> None:
        """Read the columns.

        Raises:
            ProtocolError: they do not fit together.
        """
        self._rows: Callable[[int, int, Sequence[IntArray]], tuple[TargetRow, ...]]
        if message.token_ids:
            self.kind = RowKind.TOKEN
            self.count = len(message.token_ids) // 4
            tokens = ints_from_bytes(message.token_ids, self.count, "the column of token rows")
            self._rows = lambda start, stop, _: tuple(map(TokenRow, tokens[start:stop]))
        else:
            self.kind = RowKind.SUPPORT
            supports = _SupportColumns.read(message)
            self.count = len(supports.outside_masses)
            self._rows = supports.rows

    def rows(self, start: int, stop: int, step: VerifyStep) -> tuple[TargetRow, ...]:
        """The rows from `start` to before `stop`, which answer `step`.

        Raises:
            ProtocolError: they are of another kind, or about other supports.
        """
        if self.kind is not step.row_kind:
            raise ProtocolError(
                f"{self.kind.value}_rows came where {step.row_kind.value} rows were requested"
            )
        padding = (_EMPTY_SUPPORT,) * (stop - start - len(step.supports))
        return self._rows(start, stop, (*step.supports, *padding))


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class ColumnAnswer:
    """A sequence's verification within a block."""

    base_length: int
    cost: StepCost | None
    block: RowBlock
    start: int
    stop: int

    def rows(self, step: VerifyStep) -> tuple[TargetRow, ...]:
        """See `RowBlock.rows`."""
        return self.block.rows(self.start, self.stop, step)


@dataclass(frozen=True, slots=True, eq=False)
class _SupportColumns:
    """R support rows with N ids."""

    bounds: list[tuple[int, int]]
    """Where the ids of each row begin and end, R."""
    probs: FloatArray
    """Shape [N]."""
    outside_masses: list[float]
    outside_token_ids: list[int]
    outside_probs: list[float] | None
    statistics: _StatisticsColumns | None

    @staticmethod
    def read(message: RowColumns) -> _SupportColumns:
        sizes = sizes_from_bytes(message.support_sizes, "the column of support sizes")
        count, total = len(sizes), sum(sizes)
        outside = message.outside_probabilities
        return _SupportColumns(
            list(pairwise(accumulate(sizes, initial=0))),
            floats_from_bytes(message.probabilities, total, "the column of support rows").astype(float),
            floats_from_bytes(message.outside_masses, count, "the column of outside masses").tolist(),
            ints_from_bytes(message.outside_token_ids, count, "the column of outside tokens"),
            floats_from_bytes(outside, count, "the column of outside probabilities").tolist()
            if outside
            else None,
            _StatisticsColumns.read(message, count, total) if message.entropies else None,
        )

    def rows(self, start: int, stop: int, supports: Sequence[IntArray]) -> tuple[SupportRow, ...]:
        bounds, statistics = self.bounds[start:stop], self.statistics
        for (first, last), support in zip(bounds, supports, strict=False):
            if last - first != len(support):
                raise ProtocolError(
                    f"a support row holds {4 * (last - first)} bytes; it must hold {4 * len(support)} for "
                    f"{len(support)} values"
                )
        return tuple(
            SupportRow(
                support,
                self.probs[first:last],
                outside_mass,
                outside_token_id,
                None if statistics is None else statistics.of_row(start + i, first, last),
                outside_prob,
            )
            for i, (support, (first, last), outside_mass, outside_token_id, outside_prob) in enumerate(
                zip(
                    supports,
                    bounds,
                    self.outside_masses[start:stop],
                    self.outside_token_ids[start:stop],
                    repeat(None) if self.outside_probs is None else self.outside_probs[start:stop],
                    strict=False,
                )
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class _StatisticsColumns:
    """Statistics of R rows with N ids."""

    entropies: list[float]
    max_probs: list[float]
    argmax_token_ids: list[int]
    ranks: IntArray
    """Shape [N]."""
    logits: Float32Array
    """Shape [N]."""

    @staticmethod
    def read(message: RowColumns, count: int, total: int) -> _StatisticsColumns:
        ranks = ints_from_bytes(message.ranks, total, "the column of ranks")
        return _StatisticsColumns(
            floats_from_bytes(message.entropies, count, "the column of entropies").tolist(),
            floats_from_bytes(
                message.max_probabilities, count, "the column of highest probabilities"
            ).tolist(),
            ints_from_bytes(message.argmax_token_ids, count, "the column of argmax tokens"),
            np.array(ranks, dtype=np.int64),
            floats_from_bytes(message.logits, total, "the column of logits"),
        )

    def of_row(self, row: int, first: int, last: int) -> RowStatistics:
        return RowStatistics(
            self.entropies[row],
            self.max_probs[row],
            self.argmax_token_ids[row],
            self.ranks[first:last],
            self.logits[first:last],
        )


def _floats(values: list[float]) -> bytes:
    return np.array(values, "<f4").tobytes()

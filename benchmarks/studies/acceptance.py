"""How long one acceptance takes: each rule and kind of row, five proposed tokens, a vocabulary of 128k.

    python -m benchmarks.studies.acceptance

Not counted: what draft and target compute, and the network. The round's uniforms are a line of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from coordinator.rejection import AcceptanceRule, RejectionOptions, draw_uniforms, resolve
from tandem.types import (
    DenseRow,
    Float32Array,
    FloatArray,
    IntArray,
    Proposal,
    RowKind,
    RowStatistics,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)

VOCABULARY_SIZE = 128_000
TOKEN_COUNT = 5
SUPPORT_SIZE = 64
BASE_LENGTH = 100
MEASURING_SECONDS = 0.5
"""For each number of the table."""

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=1)


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    rule: str
    row_kind: RowKind
    sampling: SamplingParams = SAMPLED
    limit_microseconds: float | None = None
    """Limit of the line."""


CASES = (
    Case("greedy", RowKind.TOKEN, GREEDY, limit_microseconds=20),
    Case("strict", RowKind.TOKEN, limit_microseconds=20),
    Case("residual", RowKind.SUPPORT, limit_microseconds=100),
    Case("block", RowKind.SUPPORT, limit_microseconds=100),
    Case("typical-acceptance", RowKind.SUPPORT, limit_microseconds=100),
    Case("logit-comparison", RowKind.SUPPORT, limit_microseconds=100),
    Case("greedy", RowKind.DENSE, GREEDY),
    Case("strict", RowKind.DENSE),
    Case("residual", RowKind.DENSE),
    Case("block", RowKind.DENSE),
)


class Round:
    """A proposal with equal probabilities in draft and target, so that the uniforms decide what is kept."""

    def __init__(self, rule: AcceptanceRule, case: Case) -> None:
        rng = np.random.default_rng(0)
        self._rng = rng
        self._rule = rule
        self._case = case
        supports = [rng.permutation(VOCABULARY_SIZE)[:SUPPORT_SIZE] for _ in range(TOKEN_COUNT)]
        probs: FloatArray = np.sort(rng.dirichlet(np.ones(SUPPORT_SIZE)))[::-1].copy()
        token_ids = tuple(int(support[0]) for support in supports)
        self._proposal = Proposal(
            BASE_LENGTH,
            token_ids,
            tuple(SparseDistribution(support, probs) for support in supports),
            np.zeros(TOKEN_COUNT, dtype=np.float32),
        )
        asked = rule.supports(self._proposal)
        rows = [self._row(token_ids[index], asked[index], probs) for index in range(TOKEN_COUNT)]
        last = self._row(0, np.array([], dtype=np.int64), probs)
        self._verification = Verification(BASE_LENGTH, (*rows, last))
        self._uniforms = draw_uniforms(case.sampling.seed, BASE_LENGTH, TOKEN_COUNT)

    def _row(self, token_id: int, support: IntArray, probs: FloatArray) -> TargetRow:
        if self._case.row_kind is RowKind.TOKEN:
            return TokenRow(token_id)
        if self._case.row_kind is RowKind.DENSE:
            logits: Float32Array = self._rng.normal(0, 2, VOCABULARY_SIZE).astype(np.float32)
            logits[token_id] = 20.0
            return DenseRow(logits)
        size = support.size
        statistics = RowStatistics(2.0, 0.2, token_id, np.zeros(size, np.int64), np.ones(size, np.float32))
        inside = 0.9 * probs[:size]
        told = statistics if self._rule.needs_statistics else None
        outside_prob = 0.01 if self._rule.strategy.races_recovery else None
        return SupportRow(support, inside, 1.0 - float(inside.sum()), 7, told, outside_prob)

    def accept(self, last_uniform: float) -> None:
        """Decide; `last_uniform` near 0 keeps the last token, near 1 rejects it where the rule asks for it."""
        accept = np.full(TOKEN_COUNT, 1e-12)
        accept[-1] = last_uniform
        uniforms = replace(self._uniforms, accept=accept)
        self._rule.accept(self._proposal, self._verification, self._case.sampling, uniforms)


def microseconds(call: Callable[[], object]) -> float:
    """The median time of a call."""
    call()
    times = []
    end = time.perf_counter() + MEASURING_SECONDS
    while (start := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def main() -> None:
    """Measure and print the table."""
    table = Table("rule", "rows", "all kept (us)", "last rejected (us)", "limit (us)")
    for case in CASES:
        given = Round(resolve(RejectionOptions(case.rule), case.sampling), case)
        kept, rejected = (microseconds(lambda: given.accept(last)) for last in (1e-12, 1 - 1e-12))  # noqa: B023
        limit = "" if case.limit_microseconds is None else f"{case.limit_microseconds:.0f}"
        table.add_row(case.rule, case.row_kind.value, f"{kept:.1f}", f"{rejected:.1f}", limit)
    drawing = microseconds(lambda: draw_uniforms(1, BASE_LENGTH, TOKEN_COUNT))
    table.add_row("the round's uniforms", "", f"{drawing:.1f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()

"""`python -m benchmarks.studies.acceptance`: what each rule takes for a round, one by one and together.

The rounds are those of one message of the target: K = 4, supports of one size, a draft that is like the target to a
degree. Random numbers are drawn as in the coordinator. Times are processor time, so that other work on the machine
changes them little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from coordinator.rejection import (
    KEYED,
    AcceptanceRule,
    Round,
    Support,
    resolve,
)
from tandem.config import SpeculativeConfig
from tandem.types import (
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

RULES = ("greedy", "strict", "typical-acceptance", "residual", "block")
TOKENS = 4
_OUTSIDE = 32_000
"""An id that no support has."""
_NO_IDS: IntArray = np.empty(0, dtype=np.int64)
_LIKENESS = 0.8
"""Share of the draft's distribution in the target's."""
_SECONDS = 0.2
"""Processor time of one measurement."""


def make_round(rule: AcceptanceRule, generator: np.random.Generator, support_size: int) -> Round:
    """A round of `TOKENS` proposed tokens with the cheapest kind of row that the rule takes."""
    drawn = [_distribution(generator, support_size) for _ in range(TOKENS)]
    token_ids = tuple(int(generator.choice(each.token_ids, p=each.probs)) for each in drawn)
    rows = [_row(rule, generator, *each) for each in zip(drawn, token_ids, strict=True)]
    base_length = int(generator.integers(1, 1000))
    temperature = 0.0 if rule.name == "greedy" else 1.0
    return Round(
        Proposal(base_length, token_ids, tuple(drawn)),
        Verification(base_length, (*rows, _last_row(rule))),
        SamplingParams(temperature=temperature, seed=int(generator.integers(2**62))),
    )


def _distribution(generator: np.random.Generator, size: int) -> SparseDistribution:
    ids = generator.choice(_OUTSIDE, size, replace=False).astype(np.int64)
    return SparseDistribution(ids, generator.dirichlet(np.full(size, 0.3)))


def _row(
    rule: AcceptanceRule, generator: np.random.Generator, drawn: SparseDistribution, token_id: int
) -> TargetRow:
    """The target's row at a proposed token."""
    if rule.row_kinds[0] is RowKind.TOKEN:
        return TokenRow(token_id if generator.random() < _LIKENESS else _OUTSIDE)
    size = drawn.probs.size
    probs = _LIKENESS * drawn.probs + 0.1 * generator.dirichlet(np.full(size, 0.3))
    support = drawn.token_ids
    if rule.strategy.support is Support.TOKEN:
        is_token = support == token_id
        support, probs = support[is_token], probs[is_token]
    return SupportRow(support, probs, 1.0 - float(probs.sum()), _OUTSIDE, _statistics(support), 0.01)


def _last_row(rule: AcceptanceRule) -> TargetRow:
    """The row after all proposed tokens."""
    if rule.row_kinds[0] is RowKind.TOKEN:
        return TokenRow(_OUTSIDE)
    return SupportRow(_NO_IDS, np.empty(0), 1.0, _OUTSIDE, _statistics(_NO_IDS), 0.25)


def _statistics(support: IntArray) -> RowStatistics:
    return RowStatistics(2.0, 0.5, 7, np.zeros(support.size, np.int64), np.zeros(support.size, np.float32))


def one_by_one(rule: AcceptanceRule, rounds: Sequence[Round]) -> None:
    """Decide each round as `Plan.accept` does."""
    for own in rounds:
        rule.accept(own)


def microseconds(decide: Callable[[], object], rounds: int) -> float:
    """Processor time of one round."""
    decide()
    calls, began = 0, time.process_time()
    while (used := time.process_time() - began) < _SECONDS:
        decide()
        calls += 1
    return 1e6 * used / calls / rounds


def costs(rule: AcceptanceRule, rounds: Sequence[Round], repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds of a round, one by one and together, measured in turn; none together for a rule without that."""
    alone, together = [], []
    for _ in range(repeats):
        alone.append(microseconds(partial(one_by_one, rule, rounds), len(rounds)))
        if rule.decide_many is not None:
            together.append(microseconds(partial(rule.decide_many, rounds, KEYED), len(rounds)))
    return alone, together


def main() -> None:
    """Measure each rule with each number of rounds, one by one and together in turn, and print medians."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rules", type=lambda text: text.split(","), default=list(RULES))
    parser.add_argument(
        "--rounds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64]
    )
    parser.add_argument("--support-size", type=int, default=24, help="ids of a draft's distribution")
    parser.add_argument("--repeats", type=int, default=5, help="the table shows medians")
    options = parser.parse_args()
    table = Table("rule", "rounds", "one by one (us a round)", "together (us a round)")
    for name, count in product(options.rules, options.rounds):
        sampling = SamplingParams(temperature=0.0 if name == "greedy" else 1.0)
        rule = resolve(SpeculativeConfig(rejection_sampling_strategy=name), sampling)
        generator = np.random.default_rng(count)
        rounds = [make_round(rule, generator, options.support_size) for _ in range(count)]
        found = costs(rule, rounds, options.repeats)
        table.add_row(name, str(count), *(f"{statistics.median(each):.1f}" if each else "" for each in found))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()

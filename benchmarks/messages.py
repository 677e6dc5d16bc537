"""`python -m benchmarks.messages`: what the messages between coordinator and services cost in each process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tandem.model.types import (
    Delta,
    Proposal,
    ProposeStep,
    RowKind,
    SparseDistribution,
    StepCost,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire import draft, target

SIZES = (1, 16, 64)
"""Sequences in a message."""
TOKEN_IDS = (5, 6, 7, 8)
"""A proposal."""
SUPPORT_SIZE = 24
"""Ids of each distribution."""
REPEATS = 30
SECONDS = 0.002
"""Of one repeat. The minimum of many short ones was disturbed least."""

Case = tuple[str, Callable[[], object]]
"""A message in words, and one way of it: made from nouns, encoded, decoded and read."""


def main() -> None:
    """Print a table."""
    lines = [
        "| message | " + " | ".join(f"n = {size}" for size in SIZES) + " |",
        "|---" * (1 + len(SIZES)) + "|",
    ]
    for row_kind in (RowKind.TOKEN, RowKind.SUPPORT):
        columns = [dict(cases(row_kind, size)) for size in SIZES]
        for name in columns[0]:
            figures = [f"{microseconds(column[name]):.0f}" for column in columns]
            lines.append(f"| {name} | " + " | ".join(figures) + " |")
    limits = [str(8 + 5 * size) for size in SIZES]
    lines.append("| bound of one with greedy acceptance, 8 + 5 n | " + " | ".join(limits) + " |")
    sys.stdout.write("\n".join(lines) + "\n")


class Round(NamedTuple):
    """The messages of a coordinator and its services in a round, each with the number of its sequence."""

    steps: list[tuple[int, VerifyStep]]
    verifications: list[tuple[int, Verification]]
    questions: list[tuple[int, ProposeStep]]
    proposals: list[tuple[int, Proposal]]


def round_of(row_kind: RowKind, count: int) -> Round:
    """A round of so many sequences."""
    has_support = row_kind is RowKind.SUPPORT
    support = np.arange(300, 300 + SUPPORT_SIZE)
    probs = np.full(SUPPORT_SIZE, 1 / SUPPORT_SIZE)
    cost = StepCost(0.005, count, 5 * count)
    proposed = len(TOKEN_IDS)
    supports = (support,) * proposed if has_support else ()
    step = VerifyStep(Delta(1000, [4, *TOKEN_IDS]), row_kind, proposed + 1, supports, serial=7)
    rows: tuple[TargetRow, ...]
    if has_support:
        last = SupportRow(np.empty(0, np.int64), np.empty(0), 1.0, 9, None, 0.2)
        rows = (*[SupportRow(support, probs, 0.1, 7, None, 0.05)] * proposed, last)
    else:
        rows = tuple(TokenRow(token_id) for token_id in (*TOKEN_IDS, 9))
    distributions = (SparseDistribution(support, probs),) * proposed if has_support else ()
    sequences = range(1, count + 1)
    return Round(
        steps=[(sequence, step) for sequence in sequences],
        verifications=[(sequence, Verification(1001, rows, cost, serial=7)) for sequence in sequences],
        questions=[(sequence, ProposeStep(Delta(1000, [4, 5]), proposed)) for sequence in sequences],
        proposals=[
            (sequence, Proposal(1002, TOKEN_IDS, distributions, None, cost)) for sequence in sequences
        ],
    )


def cases(row_kind: RowKind, count: int) -> Iterator[Case]:
    """The messages of a round of so many sequences."""
    rule = "greedy" if row_kind is RowKind.TOKEN else "residual"
    steps, verifications, questions, proposals = round_of(row_kind, count)
    step = steps[0][1]

    def verify_request() -> object:
        content = target.requests_to_proto(steps).SerializeToString()
        return list(target.requests_from_proto(target_pb2.VerifyRequest.FromString(content)))

    def verify_response() -> object:
        content = target.answers_to_proto(verifications).SerializeToString()
        answers = target.answers_from_proto(target_pb2.VerifyResponse.FromString(content))
        return [answer.verification(step) for _, answer in answers if isinstance(answer, target.Answer)]

    def propose_request() -> object:
        content = draft.requests_to_proto(questions).SerializeToString()
        return list(draft.requests_from_proto(draft_pb2.ProposeRequest.FromString(content)))

    def propose_response() -> object:
        content = draft.answers_to_proto(proposals).SerializeToString()
        return list(draft.answers_from_proto(draft_pb2.ProposeResponse.FromString(content)))

    yield f"steps to a target, {rule}", verify_request
    yield f"verifications, {rule}", verify_response
    yield f"steps to a draft, {rule}", propose_request
    yield f"proposals, {rule}", propose_response


def microseconds(function: Callable[[], object]) -> float:
    """The minimum of a call's time of this thread, which other processes do not add to."""
    function()
    begin = time.thread_time()
    function()
    calls = max(1, int(SECONDS / max(time.thread_time() - begin, 1e-6)))
    found: list[float] = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(calls):
            function()
        found.append((time.thread_time() - begin) / calls)
    return min(found) * 1e6


if __name__ == "__main__":
    main()

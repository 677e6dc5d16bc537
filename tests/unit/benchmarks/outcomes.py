"""Invented answers of contenders."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reports.report import Cell, Machine, PairInfo, PhaseRow, PrefixGain, Report, Spread, WireBytes
from benchmarks.workload import Answer, Outcome

SPREAD = Spread(median=0.02, low=0.01, high=0.04)


def answer(*arrivals: tuple[float, int], first_id: int = 0) -> Answer:
    """Ascending ids that came in these pieces."""
    made = Answer()
    for seconds, count in arrivals:
        start = first_id + len(made.token_ids)
        made.add(seconds, list(range(start, start + count)))
    return made


def outcome(
    seconds: float, *answers: Answer, rounds: int = 0, drafted: int = 0, accepted: int = 0
) -> Outcome:
    return Outcome(list(answers), seconds, rounds, drafted, accepted)


def cell(contender: str, batch: int, temperature: float, *tokens_per_second: float) -> Cell:
    return Cell(
        contender=contender,
        batch=batch,
        temperature=temperature,
        tokens_per_second=tokens_per_second,
        first_token_seconds=SPREAD,
        inter_token_seconds_p50=0.005,
        inter_token_seconds_p99=0.02,
        acceptance_rate=0.75 if contender == "speculative" else None,
    )


def report(cells: Sequence[Cell], **changes: object) -> Report:
    made = Report(
        taken_at="2026-11-21 12:00 UTC",
        command="tandem bench",
        machine=Machine(
            processor="<A & B>", cores=2, device="cpu", load_before=0.1, versions={"python": "3"}
        ),
        pair=PairInfo(name="demo", target_parameters=9_260_000, draft_parameters=1_030_000),
        dtype="bfloat16",
        threads=2,
        max_tokens=64,
        num_speculative_tokens=4,
        rounds=len(cells[0].tokens_per_second),
        titles={name: f"title of {name} <&>" for name in dict.fromkeys(one.contender for one in cells)},
        cells=tuple(cells),
        phases=(
            PhaseRow(
                path="services", batch=1, temperature=0, draft=0.004, verify=0.01, sampling=2e-5, wait=1e-4
            ),
        ),
        wire=(WireBytes(temperature=0, draft=20.0, target=30.0),),
        prefix=PrefixGain(prefix_tokens=512, first_seconds=SPREAD, again_seconds=SPREAD, ratio=0.2),
    )
    return made.model_copy(update=changes)

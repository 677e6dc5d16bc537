"""Reports of `tandem bench`: figures of invented answers, goals, tables, chart and JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.bench import recorded_command
from benchmarks.peers import Answer, Outcome
from benchmarks.report import (
    Cell,
    Machine,
    PairInfo,
    PhaseRow,
    PrefixGain,
    Report,
    Spread,
    WireBytes,
    cell_of,
    inter_token_seconds,
    markdown,
    render,
    show,
    svg,
    with_targets,
)

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


CELLS = [
    cell("target-alone", 1, 0.0, 10.0, 20.0, 30.0),
    cell("speculative", 1, 0.0, 30.0, 20.0, 60.0),
    cell("one-process", 1, 0.0, 30.0, 40.0, 50.0),
    cell("transformers", 1, 0.0, 10.0, 10.0, 10.0),
    cell("assisted", 1, 0.0, 20.0, 10.0, 40.0),
    cell("assisted-defaults", 1, 0.0, 30.0, 20.0, 60.0),
    cell("target-alone", 16, 0.0, 80.0, 100.0, 60.0),
    cell("speculative", 16, 0.0, 90.0, 90.0, 90.0),
]


def test_targets_are_medians_of_ratios_within_a_round() -> None:
    reached = {target.name: target for target in with_targets(report(CELLS)).targets}

    split = reached[
        "speculative through the services, by the same loop in one process: batch 1, temperature 0"
    ]
    assert (split.reached, split.is_met) == (1.0, True)  # of 1.0, 0.5, 1.2
    assisted = reached[
        "speculative, by the better of transformers' assisted generations: batch 1, temperature 0"
    ]
    assert (assisted.reached, assisted.is_met) == (1.0, False)
    batched = reached["speculative, by the target alone: batch 16, temperature 0"]
    assert batched.is_met is True
    assert batched.reached == pytest.approx(1.125)
    wider = reached["the target alone at batch 16, by itself at batch 1: temperature 0"]
    assert (wider.reached, wider.is_met) == (5.0, False)
    prefix = next(target for name, target in reached.items() if name.startswith("time to first token"))
    assert (prefix.reached, prefix.is_met) == (0.2, True)


def test_tables_hold_every_cell_and_who_was_absent() -> None:
    made = report(CELLS, absent={"vllm": "name a Python"})
    made = with_targets(made)
    console = Console(file=io.StringIO(), width=200)

    show(console, made)

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for one in CELLS:
        assert f"{one.speed.median:.1f}" in text
    for words in ("Batch 16, temperature 0", "A round by phase", "not met", "vllm: name a Python", "75.0%"):
        assert words in text


def test_tables_and_chart_can_be_made_again_from_the_json(tmp_path: Path) -> None:
    made = report(CELLS)
    made = with_targets(made)
    file = tmp_path / "bench_demo.json"
    file.write_text(made.model_dump_json())

    render([file])

    assert file.with_suffix(".md").read_text() == markdown(made, "bench_demo.svg")
    assert file.with_suffix(".svg").read_text() == svg(made)


@pytest.mark.parametrize(
    "own", [("--vllm-python", "/home/someone/bin/python"), ("--vllm-python=/home/someone",)]
)
def test_a_report_does_not_tell_where_a_machine_keeps_things(own: tuple[str, ...]) -> None:
    words = recorded_command("tandem bench", ["--batch", "1", *own, "--json", "a.json"])

    assert "someone" not in words
    assert words.startswith("tandem bench --batch 1 --vllm-python")
    assert words.endswith("... --json a.json")


def test_tokens_of_one_piece_share_the_time_that_it_took() -> None:
    gaps = inter_token_seconds(answer((0.5, 1), (0.6, 1), (1.0, 4)))

    assert gaps == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])


def test_a_cell_has_a_speed_for_each_round_and_the_rest_over_all_of_them() -> None:
    cell = cell_of(
        "speculative",
        2,
        0.0,
        [
            outcome(1.0, answer((0.1, 1), (1.0, 3)), answer((0.3, 4)), rounds=4, drafted=8, accepted=4),
            outcome(2.0, answer((0.2, 4)), answer((0.2, 4)), rounds=4, drafted=8, accepted=2),
        ],
        [None, None],
    )

    assert cell.tokens_per_second == (8.0, 4.0)
    assert (cell.speed.low, cell.speed.median, cell.speed.high) == (4.0, 6.0, 8.0)
    assert cell.first_token_seconds.median == pytest.approx(0.2)
    assert cell.acceptance_rate == 6 / 16
    assert cell.tokens_per_pass == 16 / 8
    assert cell.same_tokens is None, "there is nothing to compare with"

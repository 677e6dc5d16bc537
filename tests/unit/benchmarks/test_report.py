"""Reports of `tandem bench`: figures of invented answers, goals, tables, chart and JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from benchmarks.bench import recorded_command
from benchmarks.contenders import BenchSettings
from benchmarks.pairs import PairInfo
from benchmarks.peers import Answer, Outcome
from benchmarks.report import (
    Cell,
    Machine,
    Report,
    Spread,
    Table,
    by_best,
    cell_of,
    inter_token_seconds,
    markdown,
    show,
)

SPREAD = Spread(median=0.02, low=0.01, high=0.04)


def answer(*arrivals: tuple[float, int]) -> Answer:
    """Ascending ids that came in these pieces."""
    made = Answer()
    for seconds, count in arrivals:
        start = len(made.token_ids)
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
        pair=PairInfo("demo", 9_260_000, 1_030_000),
        settings=BenchSettings(threads=2, rounds=len(cells[0].tokens_per_second)),
        cells=tuple(cells),
        tables=(
            Table(
                title="On the wire",
                columns=(("temperature", "number"), ("draft", "bytes"), ("round", "seconds")),
                rows=((0.0, 20.0, 0.0141), (0.7, None, 0.2)),
            ),
        ),
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


def printed(made: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(console, made)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_hold_every_cell_and_who_was_absent() -> None:
    text = printed(report(CELLS, absent={"vllm": "name a Python"}))

    for one in CELLS:
        assert f"{one.speed.median:.1f}" in text
    for words in ("Batch 16, temperature 0", "vLLM: name a Python", "75.0%"):
        assert words in text
    assert "| 0 | 20 B | 14 ms |\n| 0.7 |  | 200 ms |" in markdown(report(CELLS)), "a figure has its unit"


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


def test_the_first_tokens_of_long_completions_are_reported_apart() -> None:
    pieces = {
        "target-alone": answer((0.5, 1), (1.49, 99), (2.49, 100)),
        "speculative": answer((0.5, 1), (1.5, 99), (2.0, 100)),
    }
    cells = [cell_of(name, 1, 0.0, [outcome(2.0, piece)], []) for name, piece in pieces.items()]

    assert cells[1].first_tokens_per_second == (99.0,)
    assert cells[1].later_tokens_per_second == (200.0,)
    text = markdown(report(cells))
    assert "## The first 100 tokens, and the rest" in text
    assert "| Tandem, speculative | 1 | 0 | 99.0 | 0.99 x |  | 200.0 | 2.00 x |  |" in text
    assert not cell_of("speculative", 1, 0.0, [outcome(1.0, answer((1.0, 64)))], []).first_tokens_per_second


def test_the_best_other_is_chosen_by_the_other_rounds() -> None:
    """A contender that is as fast as each other is not called slower because one of them was lucky in each round."""
    one = (10.0, 10.0, 13.0)
    two = (12.0, 9.0, 10.0)

    assert by_best((10.0, 10.0, 10.0), [one, two, ()]) == pytest.approx(1.0)
    assert by_best((5.0, 5.0, 20.0), [one]) == pytest.approx((0.5 * 0.5 * 20 / 13) ** (1 / 3))
    assert by_best((10.0, 10.0), [one[:2]]) is None
    assert by_best((10.0, 10.0, 10.0), [()]) is None


def test_a_cell_has_a_speed_for_each_round_and_the_rest_over_all_of_them() -> None:
    outcomes = [
        outcome(1.0, answer((0.1, 1), (1.0, 3)), answer((0.3, 4)), rounds=4, drafted=8, accepted=4),
        outcome(2.0, answer((0.2, 4)), answer((0.2, 4)), rounds=4, drafted=8, accepted=2),
    ]
    cell = cell_of("speculative", 2, 0.0, outcomes, [])

    assert cell.tokens_per_second == (8.0, 4.0)
    assert (cell.speed.low, cell.speed.median, cell.speed.high) == (4.0, 6.0, 8.0)
    assert cell.first_token_seconds.median == pytest.approx(0.2)
    assert cell.acceptance_rate == 6 / 16
    assert cell.tokens_per_pass == 16 / 8
    assert cell.same_tokens is None, "there is nothing to compare with"

"""The numbers of docs/scaling.md are what `tandem plan` says."""

from __future__ import annotations

import re
import shlex

import pytest

from coordinator.cli.planning import StepTimes, plan
from coordinator.speculation.gains import expected_tokens
from tests.commands import run_here
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
UTILISATION = 0.7
RATES = (0.9, 0.8, 0.7)


def times(round_trip_ms: float) -> StepTimes:
    """The pair of the page."""
    return StepTimes(0.022, 0.0015, RATES, round_trip_ms / 1e3)


def test_the_example_is_the_output_of_its_command() -> None:
    (command,) = re.findall(r"^    tandem (plan .*)$", PAGE, re.MULTILINE)
    (output,) = re.findall(r"```text\n(batch 1\n.*?)```", PAGE, re.DOTALL)
    done = run_here(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == output.splitlines()


def test_the_table_of_distances_follows_the_same_model() -> None:
    rows = re.findall(r"^\| ([\d.]+) ms \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 7
    near = times(0.0)
    for distance, cells in rows:
        seconds = float(distance) / 1e3
        both = times(float(distance))
        one_away = max(
            expected_tokens(near.rates(count))[-1] / (near.round_seconds(1, count) + seconds)
            for count in range(1, 17)
        )
        expected = (
            1.0 / both.round_seconds(1, 0),
            max(expected_tokens(both.rates(k))[-1] / both.round_seconds(1, k) for k in range(1, 17)),
            one_away,
            one_away,
        )
        assert [cell.strip() for cell in cells.split("|")] == [f"{value:.1f}" for value in expected]


@pytest.mark.parametrize(("batch", "round_ms", "drafts"), [(16, 45.67, 5.98), (1, 31.88, 3)])
def test_targets_for_each_draft(batch: int, round_ms: float, drafts: float) -> None:
    pair = times(0.5)
    best = plan(pair, batch, 6).best_tokens
    seconds = pair.round_seconds(batch, best)
    assert seconds * 1e3 == pytest.approx(round_ms, abs=0.005)
    occupancy = pair.drafting_seconds(batch, best) / seconds
    assert UTILISATION / occupancy == pytest.approx(drafts, abs=0.03)
    assert f"{occupancy:.3f}" in PAGE

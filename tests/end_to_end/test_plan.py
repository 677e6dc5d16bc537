"""`tandem plan`: the measurement of a pair on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.plan import measured_through
from coordinator.cli.planning import plan
from tests.end_to_end.processes import TANDEM, run

pytestmark = pytest.mark.slow


async def test_a_plan_measures_every_length_and_the_acceptance(address: str) -> None:
    """No times are compared: every length must have one, and the demo draft must often be right."""
    measured = await measured_through(address, [1, 2], 4, 0.0)
    assert set(measured) == {1, 2}
    for batch, times in measured.items():
        assert len(times.verify_by_length) == 5
        assert min(times.verify_by_length) > 0.0
        assert min(times.draft_step_seconds, times.round_trip_seconds) > 0.0
        assert len(times.acceptance_rates) == 4
        assert 0.3 < times.acceptance_rates[0] < 1.0
        assert [row.tokens for row in plan(times, batch, 4).rows] == [0, 1, 2, 3, 4]


def test_a_pair_that_cannot_start_is_reported_in_one_sentence(tmp_path: Path) -> None:
    result = run(TANDEM, "plan", "--target", str(tmp_path))
    assert result.returncode != 0
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the pair could not be measured: ")
    assert "config.json" in line

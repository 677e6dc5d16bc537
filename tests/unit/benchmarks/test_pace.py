"""Steps that take at least so long."""

from __future__ import annotations

import pytest

from benchmarks.models.pace import Pace
from tandem.engine.core.events import StepRecord


def test_a_step_sleeps_for_what_is_left_of_its_time() -> None:
    pace = Pace.from_text("6.5,1.2,0.1")
    slept: list[float] = []
    seen: list[StepRecord] = []
    wait = pace.paced("target", seen.append, slept.append)
    wait(StepRecord(1, 1, 1, 0.001, 0.0025))
    wait(StepRecord(1, 9, 9, 0.001, 0.0))
    wait(StepRecord(1, 1, 1, 0.1, 0.1))
    assert slept == pytest.approx([0.004, 0.0065 * 1.1])
    assert len(seen) == 3
    assert pace.seconds("draft", 1) == pytest.approx(0.0012)


@pytest.mark.parametrize("text", ["", "6.5", "a,b", "0,1", "6.5,1.2,-1", "1,2,3,4"])
def test_a_pace_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="VERIFY_MS"):
        Pace.from_text(text)

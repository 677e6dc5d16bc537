"""How long a draft is waited for follows from what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.pace import Pace


def test_before_anything_is_known_the_wait_is_short() -> None:
    assert Pace(None).patience_seconds == 0.25


def test_a_few_verifications_past_the_usual_time() -> None:
    pace = Pace(None)
    pace.verified(9.0, 0, is_first=True)
    pace.verified(0.1, 4, is_first=False)
    pace.proposing.add(0.2)
    assert pace.patience_seconds == pytest.approx(0.6)


def test_the_first_answer_counts_only_while_there_is_no_other() -> None:
    pace = Pace(None)
    pace.verified(0.15, 0, is_first=True)
    assert pace.patience_seconds == pytest.approx(0.6)
    pace.verified(0.1, 4, is_first=False)
    assert pace.patience_seconds == pytest.approx(0.4)


def test_a_configured_wait_is_what_was_configured() -> None:
    pace = Pace(3.0)
    pace.verified(0.1, 4, is_first=False)
    assert pace.patience_seconds == 3.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 8), st.booleans()), max_size=20))
def test_a_draft_that_hangs_costs_less_than_a_second(times: list[tuple[float, int, bool]]) -> None:
    pace = Pace(None)
    for seconds, proposed, is_first in times:
        pace.verified(seconds, proposed, is_first=is_first)
        pace.proposing.add(seconds)
    assert 0.25 <= pace.patience_seconds < 1.0


def test_a_step_is_taken_once_and_reading_all_tokens_is_none() -> None:
    pace = Pace(None)
    assert not pace.take_step()
    pace.verified(0.1, 4, is_first=False)
    assert [pace.take_step(), pace.take_step()] == [True, False]
    pace.verified(0.1, 0, is_first=True)
    assert not pace.take_step()

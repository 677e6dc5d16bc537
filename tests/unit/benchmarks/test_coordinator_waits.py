"""Waits of rounds from a coordinator's page of metrics."""

from __future__ import annotations

import pytest

from benchmarks.load.coordinator_waits import quantiles, waits_of

PAGE = """\
# TYPE tandem_round_phase_seconds histogram
tandem_round_phase_seconds_bucket{le="0.001",model_name="a",phase="verify"} 9.0
tandem_round_phase_seconds_bucket{le="0.001",model_name="a",phase="wait"} 4.0
tandem_round_phase_seconds_bucket{le="+Inf",model_name="a",phase="wait"} 4.0
tandem_round_phase_seconds_bucket{le="0.001",model_name="b",phase="wait"} 2.0
tandem_round_phase_seconds_bucket{le="+Inf",model_name="b",phase="wait"} 6.0
tandem_round_phase_seconds_sum{model_name="a",phase="wait"} 1.0
tandem_round_wait_seconds_bucket{le="0.001",model_name="a",place="answer"} 0.0
tandem_round_wait_seconds_bucket{le="0.01",model_name="a",place="answer"} 8.0
tandem_round_wait_seconds_bucket{le="+Inf",model_name="a",place="answer"} 8.0
"""


def test_counts_are_read_by_place_and_added_over_models() -> None:
    infinity = float("inf")
    assert waits_of(PAGE) == {
        "between": {0.001: 6.0, infinity: 10.0},
        "answer": {0.001: 0.0, 0.01: 8.0, infinity: 8.0},
    }


def test_quantiles_are_those_of_the_waits_between_two_readings() -> None:
    later = PAGE.replace(
        'le="0.01",model_name="a",place="answer"} 8', 'le="0.01",model_name="a",place="answer"} 10'
    )
    later = later.replace(
        'le="+Inf",model_name="a",place="answer"} 8', 'le="+Inf",model_name="a",place="answer"} 10'
    )
    found = quantiles(waits_of(PAGE), waits_of(later))
    assert found == {"answer": {"p50": pytest.approx(5.5), "p99": pytest.approx(9.91)}}

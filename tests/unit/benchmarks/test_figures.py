"""Statistics computed from the arrival times of tokens."""

from __future__ import annotations

import pytest

from benchmarks.reports.report import cell_of, inter_token_seconds, quantile
from tests.unit.benchmarks.outcomes import answer, outcome


def test_tokens_of_one_piece_share_the_time_that_it_took() -> None:
    gaps = inter_token_seconds(answer((0.5, 1), (0.6, 1), (1.0, 4)))

    assert gaps == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])


def test_the_first_piece_tells_nothing_of_the_time_between_tokens() -> None:
    assert inter_token_seconds(answer((0.5, 3))) == []


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(share: float, expected: int) -> None:
    assert quantile(range(1, 101), share) == expected


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


def test_texts_are_the_same_up_to_the_first_token_that_differs() -> None:
    reference = outcome(1.0, answer((1.0, 4)), answer((1.0, 4)))
    other = outcome(1.0, answer((1.0, 4)), answer((1.0, 4)))
    other.answers[1].token_ids[1] = 99

    cell = cell_of("transformers", 2, 0.0, [other], [reference])

    assert cell.same_tokens == 5 / 8
    assert cell_of("transformers", 2, 1.0, [other], [reference]).same_tokens is None, "drawn texts may differ"

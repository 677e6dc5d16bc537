"""How the demo pair's recipe counts repetition."""

from __future__ import annotations

import pytest

from models.demo.recipe.repetition import loops, repeated_share


def test_a_text_loops_when_an_8_gram_occurs_three_times() -> None:
    line = list(range(8))
    between = [100, 101, 102]
    assert not loops([*line, *between, *line])
    assert loops([*line, *between, *line, 103, *line])
    assert not loops([*line[:7], *between, *line[:7], 103, *line[:7]])
    assert loops([5] * 10)
    assert not loops([5] * 9)
    assert not loops([])


def test_the_share_of_repeated_4_grams() -> None:
    assert repeated_share([1, 2, 3, 4, 5]) == 0
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([1, 2, 3]) == 0

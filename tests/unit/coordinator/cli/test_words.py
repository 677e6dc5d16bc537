"""Numbers are formatted for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli.admin.config import pairs
from coordinator.cli.admin.views import bar, duration, milliseconds, percent, plural
from tandem.errors import ConfigurationError


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m 0s"),
        (725, "12m 5s"),
        (3600, "1h 0m"),
        (90061, "1d 1h"),
        (400000, "4d 15h"),
    ],
)
def test_a_duration_has_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "-"), (0.00042, "0.4 ms"), (0.0314, "31.4 ms"), (1.2345, "1234 ms")]
)
def test_milliseconds_have_their_significant_digits(seconds: float | None, words: str) -> None:
    assert milliseconds(seconds) == words


def test_the_share_of_zero_is_undefined() -> None:
    assert percent(0, 0) == "-"
    assert percent(0.5) == "50.0%"
    assert percent(1, 3) == "33.3%"


def test_one_is_singular() -> None:
    assert [plural(count, "token") for count in (0, 1, 1200)] == ["0 tokens", "1 token", "1,200 tokens"]


@given(st.floats(0.0, 1.0), st.integers(1, 60))
def test_the_length_of_a_bar_is_its_share(share: float, width: int) -> None:
    drawn = bar(share, width)
    eighths = drawn.count("█") * 8 + sum(" ▏▎▍▌▋▊▉".index(cell) for cell in drawn if cell != "█")
    assert len(drawn) <= width
    assert eighths == pytest.approx(share * width * 8, abs=0.5 + 1e-9)


def test_names_and_values_are_joined_in_pairs() -> None:
    assert pairs(["a", "1", "b=2", "c", "x=y"]) == {"a": "1", "b": "2", "c": "x=y"}
    assert pairs(["a="]) == {"a": ""}
    with pytest.raises(ConfigurationError, match="a has no value"):
        pairs(["b", "1", "a"])

"""A state explains itself on one line."""

from __future__ import annotations

import json

import pytest

from tandem.speculation_state import DecidingFigure, SpeculationState


@pytest.mark.parametrize(
    ("value", "words"), [(95.234, "95.23"), (114.0, "114"), (0.86, "0.86"), (12345.0, "12,345")]
)
def test_a_number_is_printed_with_few_digits_and_its_unit(value: float, words: str) -> None:
    assert str(DecidingFigure("target alone", value, "tokens/s")) == f"target alone {words} tokens/s"
    assert str(DecidingFigure("speed-up", value, "")) == f"speed-up {words}"


def test_the_explanation_is_the_reason_and_its_numbers() -> None:
    figures = (DecidingFigure("with", 95.2, "tokens/s"), DecidingFigure("without", 114.1, "tokens/s"))
    state = SpeculationState(False, 0, "it is slower", figures)
    assert state.explanation == "it is slower (with 95.2, without 114.1 tokens/s)"
    assert SpeculationState(False, 0, "nobody asked").explanation == "nobody asked"
    assert SpeculationState(True, 4).explanation == ""


def test_it_is_of_types_that_json_has() -> None:
    state = SpeculationState(False, 0, "it is slower", (DecidingFigure("alone", 114.1, "tokens/s"),))
    fields = json.loads(json.dumps(state.as_dict()))
    assert fields == {
        "is_on": False,
        "num_speculative_tokens": 0,
        "reason": "it is slower",
        "figures": [{"name": "alone", "value": 114.1, "unit": "tokens/s"}],
        "explanation": "it is slower (alone 114.1 tokens/s)",
    }


def test_numbers_with_different_units_each_have_their_unit() -> None:
    figures = (DecidingFigure("acceptance length", 0.4, "tokens"), DecidingFigure("step", 30.0, "ms"))
    assert SpeculationState(False, 0, "slow", figures).explanation == (
        "slow (acceptance length 0.4 tokens, step 30 ms)"
    )

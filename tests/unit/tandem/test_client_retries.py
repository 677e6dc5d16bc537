"""Retries of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.clients.client import NO_RETRIES, Retries, Tries
from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.model.types import Chunk, TokenLogprobs

AWAY = ServiceUnavailableError("away")
UNIFORMS = st.floats(0.0, 1.0, exclude_max=True)


@given(st.integers(1, 20), UNIFORMS)
def test_waits_grow_are_spread_and_stay_bounded(tried: int, uniform: float) -> None:
    retries = Retries(attempts=30, first_wait_seconds=0.125, longest_wait_seconds=3.0)
    wait = retries.wait_seconds(AWAY, tried, uniform)
    assert wait is not None
    assert min(0.0625 * 2 ** (tried - 1), 3.0) <= wait <= min(0.125 * 2 ** (tried - 1), 3.0)


@given(st.floats(0.0, 10.0), UNIFORMS)
def test_a_retry_hint_is_followed_or_the_error_raised(hint: float, uniform: float) -> None:
    wait = Retries(longest_wait_seconds=5.0).wait_seconds(CapacityError("full", hint), 1, uniform)
    assert (wait is None) == (hint > 5.0)
    assert wait is None or hint <= wait <= hint + 0.1


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("full"),
        InvalidRequestError("no"),
        ProtocolError("?"),
        DeadlineError("late"),
        TandemError("x"),
    ],
)
def test_permanent_errors_are_not_retried(error: TandemError) -> None:
    assert Retries().wait_seconds(error, 1, 0.5) is None


def test_tries_are_bounded() -> None:
    tries = Tries(Retries(attempts=3), None, "c")
    assert tries.remaining_seconds is None
    tries.wait_seconds(AWAY)
    tries.wait_seconds(AWAY)
    with pytest.raises(ServiceUnavailableError):
        tries.wait_seconds(AWAY)
    with pytest.raises(ServiceUnavailableError):
        Tries(NO_RETRIES, None, "c").wait_seconds(AWAY)


def test_a_request_that_may_not_go_on_is_not_retried_once_it_has_begun() -> None:
    tries = Tries(Retries(goes_on=False), None, "c")
    tries.received(Chunk("a", (1,), (False,), (1,)))
    with pytest.raises(ServiceUnavailableError):
        tries.wait_seconds(AWAY)


def test_scores_of_a_prompt_come_once() -> None:
    """The next try would bring them again; behind a token it does not."""
    tries = Tries(Retries(), None, "c")
    tries.received(Chunk("", (), (), (), prompt_token_ids=(5,), prompt_logprobs=(TokenLogprobs(0.0),)))
    with pytest.raises(ServiceUnavailableError):
        tries.wait_seconds(AWAY)
    tries.received(Chunk("a", (1,), (False,), (1,)))
    assert tries.wait_seconds(AWAY) >= 0.0


def test_no_wait_exceeds_the_deadline() -> None:
    tries = Tries(Retries(first_wait_seconds=10.0, longest_wait_seconds=10.0), 1.0, "c")
    with pytest.raises(ServiceUnavailableError):
        tries.wait_seconds(AWAY)
    tries.delivered += range(7)
    with pytest.raises(
        DeadlineError, match=r"c: the request took longer than the 1 s it was given; 7 tokens were"
    ):
        tries.wait_seconds(DeadlineError("Deadline Exceeded"))

"""Both Python clients retry what may pass, a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from tandem.client import NO_RETRIES, Retries
from tandem.errors import CapacityError, InvalidRequestError, ServiceUnavailableError
from tests.service.flaky_coordinator import (
    BOTH,
    EXHAUSTED,
    UNAVAILABLE,
    FlakyCoordinator,
    completer,
    serving_flaky,
)


@BOTH
async def test_transient_errors_are_retried(kind: str) -> None:
    servicer = FlakyCoordinator(UNAVAILABLE, EXHAUSTED, UNAVAILABLE)
    async with serving_flaky(servicer) as address:
        assert (await completer(kind, address)("x")).text == "a"
    assert servicer.calls == 4


@BOTH
@pytest.mark.parametrize(
    ("make", "retries", "error", "calls"),
    [
        (lambda: FlakyCoordinator(UNAVAILABLE, after=1), Retries(), ServiceUnavailableError, 1),
        (
            lambda: FlakyCoordinator(*[UNAVAILABLE] * 9),
            Retries(first_wait_seconds=0.01),
            ServiceUnavailableError,
            4,
        ),
        (lambda: FlakyCoordinator(UNAVAILABLE), NO_RETRIES, ServiceUnavailableError, 1),
        (lambda: FlakyCoordinator(EXHAUSTED, hint=None), Retries(), CapacityError, 1),
        (lambda: FlakyCoordinator(EXHAUSTED, hint=60.0), Retries(), CapacityError, 1),
        (lambda: FlakyCoordinator(grpc.StatusCode.INVALID_ARGUMENT), Retries(), InvalidRequestError, 1),
    ],
    ids=["already begun", "too many", "retries off", "no hint", "too long a wait", "invalid"],
)
async def test_other_errors_are_raised(
    kind: str, make: Callable[[], FlakyCoordinator], retries: Retries, error: type[Exception], calls: int
) -> None:
    servicer = make()
    async with serving_flaky(servicer) as address:
        with pytest.raises(error):
            await completer(kind, address, retries=retries)("x")
    assert servicer.calls == calls

from __future__ import annotations

import os
import sys

import pytest

from tandem.engine.threads import switch_early, wait_asleep


def test_idle_threads_do_not_hold_a_core_unless_the_environment_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_asleep()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "300000")
    wait_asleep()
    assert os.environ["GOMP_SPINCOUNT"] == "300000"


def test_the_engine_does_not_wait_long_for_the_interpreter() -> None:
    before = sys.getswitchinterval()
    try:
        switch_early()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)

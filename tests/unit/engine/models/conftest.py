"""The model folder that tests of this package open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.engine.conftest import TinyModel


@pytest.fixture
def folder(llama: TinyModel, tmp_path: Path) -> Path:
    """A valid checkpoint that the test may damage."""
    return Path(shutil.copytree(llama.folder, tmp_path / "model"))

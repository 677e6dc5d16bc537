"""Edits to a model folder and the check of a refusal, for tests that open damaged folders."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.errors import ModelFolderError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def set_config(folder: Path, **values: object) -> None:
    """Set these fields of the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_one_sentence(error: ModelFolderError) -> None:
    """Assert that the error is one short line, as users should see it."""
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 1000
    assert not text.endswith(".")

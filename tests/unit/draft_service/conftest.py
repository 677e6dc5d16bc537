"""Tiny drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.engine.models.loading import LoadedModel, load_model
from tests.unit.draft_service.test_ahead import MakeModel
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    made: dict[str, Path] = {}

    def make(family: str) -> LoadedModel:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_checkpoint(made[family], CONFIGS[family]())
        return load_model(made[family], device="cpu", dtype="float32", threads=1)

    return make

"""Fixtures that several tests of services share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tandem.engine.models.loading import LoadedModel
from tests.service import engines, http_cluster
from tests.service.engines import MakePair, tiny_model
from tests.service.http_cluster import TEMPLATE, MakeApi


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2)


@pytest.fixture(scope="session")
def pair(model: LoadedModel, other_model: LoadedModel) -> MakePair:
    return partial(engines.pair, model, other_model)


@pytest.fixture
def api(model: LoadedModel, other_model: LoadedModel, template: Path) -> MakeApi:
    return partial(http_cluster.api, model, other_model, template)

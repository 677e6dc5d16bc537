"""The images, built once, and the cluster that `docker compose up` starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.compose import services
from tests.deploy.containers import TEST_OPTIONS, Cluster, why_not
from tests.deploy.images import Image, build_code, image


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The three images, and the one of the demo pair."""
    code = build_code(tmp_path_factory.mktemp("images"))
    return {name: image(name, code) for name in ("coordinator", "draft", "target", "demo-models")}


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips what needs containers where none can be made."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(
    engine: None, images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Run the cluster that `docker compose up` starts."""
    with Cluster(
        services("cpu", variables={"OPTIONS_FILE": str(TEST_OPTIONS), "ADMIN_TOKEN": "of-the-tests-alone"}),
        images,
        tmp_path_factory.mktemp("containers"),
    ) as running:
        yield running

"""The images, built once, and the cluster that `docker compose up` starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.compose import services
from tests.deploy.containers import Container, container, network, why_not
from tests.deploy.images import Image, build_code, image


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The three images."""
    code = build_code(tmp_path_factory.mktemp("images"))
    return {name: image(name, code) for name in ("coordinator", "draft", "target")}


@pytest.fixture(scope="session")
def cluster(
    images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Container]]:
    """What runs after `docker compose up`: each service started once those that it depends on are healthy."""
    if reason := why_not():
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("containers")
    wanted = services("cpu")
    running: dict[str, Container] = {}
    with ExitStack() as stack:
        net = stack.enter_context(network(folder))
        while waiting := [name for name in wanted if name not in running]:
            ready = [name for name in waiting if running.keys() >= wanted[name]["depends_on"].keys()]
            for name in ready:
                for needed in wanted[name]["depends_on"]:
                    running[needed].wait_until_healthy()
                service = wanted[name]
                running[name] = stack.enter_context(
                    container(name, service, images[service["build"]["target"]], net, folder)
                )
        running["coordinator"].wait_until_healthy()
        yield running

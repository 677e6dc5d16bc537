"""The images can be built: each RUN line of the Dockerfile runs, in its stage's root and environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.requirements import requirements
from tests.deploy.images import Dockerfile, closure
from tests.deploy.stages import Builder, BuildError, installed
from tests.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "extras"), [("coordinator", []), ("target", ["engine"]), ("draft", ["engine"])]
)
def test_an_image_has_the_packages_of_its_service(builder: Builder, stage: str, extras: list[str]) -> None:
    found = set(installed(builder.build(stage)))
    expected = {re.sub("[._]", "-", name) for name in closure(requirements(ROOT / "pyproject.toml", extras))}
    assert found == expected | {"tandem-speculative"}


@pytest.mark.parametrize("stage", ["coordinator", "draft", "target", "demo-models"])
def test_nothing_can_be_installed_in_a_container(builder: Builder, stage: str) -> None:
    for module in ("pip", "ensurepip"):
        for python in ("python", "/usr/local/bin/python"):
            done = builder.run(stage, f"{python} -m {module} --version")
            assert f"No module named {module}" in done.stderr, f"{python}: {done.stdout}{done.stderr}"


def test_the_standard_library_is_compiled(builder: Builder) -> None:
    """Otherwise each health check compiles what it imports, since the user of a container may write nothing there."""
    line = (
        "python -c 'import asyncio, email.message, importlib.util, json, logging, os, sys;"
        'modules = [module for module in sys.modules.values() if getattr(module, "__cached__", None)];'
        "assert len(modules) > 50;"
        "print([module.__name__ for module in modules if not os.path.exists(module.__cached__)])'"
    )
    done = builder.run("runtime", line)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("stage", ["draft-gpu", "target-gpu"])
def test_the_images_for_gpus_have_our_package_and_a_user_with_a_name(builder: Builder, stage: str) -> None:
    """On a stand-in for vLLM's image, whose own packages are not looked at."""
    done = builder.run(
        stage, "id --user --name; command -v python; echo > $HOME/file; ls -d /huggingface /wheel"
    )
    assert done.stdout.splitlines() == ["tandem", "/usr/local/bin/python", "/huggingface"]
    version = builder.run(
        stage, "python -c 'import importlib.metadata as m; print(m.version(\"tandem-speculative\"))'"
    )
    assert version.stdout == "0.1.0\n"


def test_the_builds_of_torch_for_cpus_are_chosen_by_an_argument(tmp_path: Path, builder: Builder) -> None:
    """By --index-url, which the stand-in for an index passes over."""
    arguments = {"TORCH_CPU_INDEX": "https://packages.example/cpu"}
    stage = Builder(tmp_path, arguments=arguments, bases=builder.bases).build("model-packages")
    assert {"torch", "transformers"} <= set(installed(stage))


@pytest.mark.parametrize(
    ("was", "fault", "stage", "words"),
    [
        (
            "FROM python:3.12.13-slim-bookworm AS build\n",
            "FROM python:3.12.13-slim-bookworm AS build\nENV PATH=/opt/tandem/bin:$PATH\n",
            "coordinator-packages",
            "No module named pip",
        ),
        (
            "constraints.txt pyproject.toml deploy/requirements.py ./",
            "pyproject.toml ./",
            "coordinator-packages",
            "requirements",
        ),
        ("torch\n", "torch==0.0.1\n", "model-packages", "torch==0.0.1"),
    ],
    ids=["path-of-another-stage", "file-not-copied", "no-such-version"],
)
def test_a_line_that_fails_is_found(
    tmp_path: Path, builder: Builder, was: str, fault: str, stage: str, words: str
) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert was in text
    path = tmp_path / "Dockerfile"
    path.write_text(text.replace(was, fault, 1), encoding="utf-8")
    builder.build("build")
    with pytest.raises(BuildError, match=words):
        Builder(tmp_path / "stages", Dockerfile(path), bases=builder.bases).build(stage)

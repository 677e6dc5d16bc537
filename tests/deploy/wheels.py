"""Wheels as a user gets them, and environments with nothing of this checkout in them."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import venv
from pathlib import Path

from tests import bundled_kernels
from tests.end_to_end.processes import run
from tests.paths import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET, ROOT, SMOLLM2_EAGLE3

PACKAGES = {
    "tandem", "tandem_coordinator", "tandem_demo", "tandem_draft", "tandem_load", "tandem_target",
}  # fmt: skip
"""All that the wheel adds to site-packages, which it shares with others."""
_SOURCES = (
    "pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "protos",
    "tandem", "draft_service", "target_service", "coordinator", "benchmarks/load",
)  # fmt: skip
# Heavy packages come from the environment that runs the tests, by a path in a .pth file. That brings in its packages,
# but not its .pth files, some of which install this checkout.
_OUTER_PACKAGES = sysconfig.get_path("purelib")
# Hides torch, as on a machine without the extra.
_HIDE_TORCH = "import os, sys; os.environ.get('TEST_HIDES_TORCH') and sys.modules.__setitem__('torch', None)"


def build(folder: Path) -> Path:
    """Build the wheel into a folder, from a copy of its sources.

    The build generates modules in its source tree, which other tests import meanwhile.
    """
    source = folder / "source"
    for path in _SOURCES:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, source / path)
    for model in (DEMO_TARGET, DEMO_DRAFT):
        shutil.copytree(model, source / model.relative_to(ROOT))
    for head in (DEMO_EAGLE3, SMOLLM2_EAGLE3):  # nothing runs these, so that empty files will do
        place = source / head.relative_to(ROOT)
        shutil.copytree(head, place, copy_function=lambda _, copied: Path(copied).touch())
    return build_from(source, folder / "wheels")


def build_from(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into an empty folder."""
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(environment: Path, *wheels: Path) -> Path:
    """Install wheels into a fresh environment, and return its folder of commands."""
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(f"{_OUTER_PACKAGES}\n{_HIDE_TORCH}\n", encoding="utf-8")
    python = str(environment / "bin" / "python")
    options = ("--ignore-installed", "--no-deps", "--no-index", "--no-compile")
    _pip("install", *options, *map(str, wheels), python=python)
    return environment / "bin"


def _pip(*arguments: str, python: str = sys.executable) -> None:
    command = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)
    ran = run(*command, environment=bundled_kernels.ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr

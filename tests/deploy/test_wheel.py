"""The wheels: what they hold, their commands, and a part of the end-to-end tests against them from an empty folder."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from hatch_build import published
from tandem import __version__
from tests import bundled_kernels
from tests.deploy.wheels import PACKAGES, install
from tests.end_to_end.processes import run
from tests.paths import ROOT

pytestmark = pytest.mark.slow

PART = (
    "test_cli.py::test_json_contains_every_field",
    "test_admin.py::test_every_verb_shows_its_result_in_every_form",
    "test_page.py::test_a_prompt_is_typed_and_tokens_appear",
    "test_shutdown.py::test_running_generations_finish_and_new_ones_are_refused",
)
"""Starts, generation, administration, the page and a shutdown."""

ORIGIN = f"""
import sys

import pytest

def pytest_sessionfinish(session):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {sorted(PACKAGES)} and not str(module.__spec__.origin).startswith(sys.prefix):
            session.exitstatus = 3
            pytest.exit(f"{{name}} is not the installed one: {{module.__spec__.origin}}", 3)
"""
"""A plug-in of pytest that fails where one of our packages is imported from elsewhere than the environment."""


def test_a_part_of_the_end_to_end_tests_passes_with_the_wheel(commands: Path, tmp_path: Path) -> None:
    """In a process of the environment that has the tests beside it, and of this checkout nothing else."""
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("tests", "benchmarks"):
        (beside / name).symlink_to(ROOT / name)
    (beside / "origin.py").write_text(ORIGIN, encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    tests = [str(beside / "tests" / "end_to_end" / each) for each in PART]
    # The settings of all tests, without the folders of the checkout.
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(beside), "-o", "pythonpath=")
    plugins = ("-p", "origin", "-p", "no:cacheprovider", "-p", "no:xdist")
    ran = run(
        *(str(commands / "python"), "-P", "-m", "pytest", *settings, *plugins, *tests),
        seconds=600.0,
        environment={"PYTHONPATH": str(beside)},
        folder=empty,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^10 passed", ran.stdout, re.MULTILINE) or "9 passed, 1 skipped" in ran.stdout
    assert not any(empty.iterdir())


def test_a_wheel_holds_its_packages_heads_and_kernels(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == PACKAGES, "site-packages is shared"
    assert "tandem_load/generator.py" in names, "tandem bench --clients needs it"
    protos = {path.name for path in (ROOT / "protos" / "tandem" / "v1").glob("*.proto")}
    assert {f"tandem/v1/{name}" for name in protos} <= names, "tandem protos writes them"
    assert "tandem/py.typed" in names, "type checkers read the annotations of a package that has it"
    for head in ("tandem_demo/eagle3", "tandem_demo/smollm2/eagle3"):
        assert {f"{head}/config.json", f"{head}/model.safetensors"} <= names
    assert sorted(name for name in names if name.endswith(".so")) == sorted(bundled_kernels.PLACES)


def test_a_wheel_describes_itself_with_links_that_work(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.splitlines()[2] in metadata
    relative = r"\]\((?!https?:)[^)]*\)"
    assert re.search(relative, readme)
    assert re.search(relative, metadata) is None
    linked = published(readme, "https://example.org/a/tandem")
    assert re.search(relative, linked) is None
    assert "[scaling](https://example.org/a/tandem/blob/main/docs/scaling.md)" in linked


def held(wheel: Path) -> set[str]:
    """The names at the top of a wheel, but for its description."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" not in name}


def test_the_packages_beside_tandem_hold_one_package_each(audit_wheel: Path, plugin_wheel: Path) -> None:
    assert held(audit_wheel) == {"tandem_audit"}
    assert held(plugin_wheel) == {"tandem_vllm"}


def test_the_audit_needs_neither_tandem_nor_torch(audit_wheel: Path, tmp_path: Path) -> None:
    commands = install(tmp_path / "environment", audit_wheel)
    hidden = {"TEST_HIDES_TORCH": "1", "PYTHONPATH": ""}
    ran = run(str(commands / "python"), "-P", "-c", "import tandem", environment=hidden, folder=tmp_path)
    assert "No module named 'tandem'" in ran.stderr
    ran = run(str(commands / "tandem-audit"), "--help", environment=hidden, folder=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("Usage: tandem-audit ")


def test_no_file_of_the_working_folder_is_imported(commands: Path, tmp_path: Path) -> None:
    """Files with the names of our packages, for commands that start no service; test_first_hour has folders."""
    for package in (*PACKAGES, "tandem_audit", "tandem_vllm"):
        (tmp_path / f"{package}.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    for words in (("tandem", "--version"), ("tandem", "audit", "--help"), ("tandem-audit", "--help")):
        ran = run(str(commands / words[0]), *words[1:], environment={"PYTHONPATH": ""}, folder=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, ""), words
        if "--version" in words:
            assert ran.stdout == f"tandem {__version__}\n", "an installed wheel knows no commit"
    source = "import tandem_coordinator.drafting, tandem_vllm.settings as s; print(s.__file__)"
    ran = run(
        *(str(commands / "python"), "-P", "-c", source), environment={"PYTHONPATH": ""}, folder=tmp_path
    )
    assert ran.stdout.startswith(str(commands.parent)), ran.stderr

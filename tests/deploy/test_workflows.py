"""GitHub's workflows and the hooks of pre-commit name what is there; `make lint` checks them by their schemas."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.deploy.images import Dockerfile
from tests.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"


def jobs(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    found: dict[str, Any] = read["jobs"]
    return found


def test_every_named_target_of_make_is_in_the_makefile() -> None:
    targets = set(
        re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    pattern = re.compile(r"(?:^|run: |entry: |`)make (?:--silent )?([a-z0-9-]+)", re.MULTILINE)
    for files in (WORKFLOWS, [HOOKS], [ROOT / "CONTRIBUTING.md"]):
        named = {name for file in files for name in pattern.findall(file.read_text(encoding="utf-8"))}
        assert named, files
        assert named <= targets


def test_the_hooks_are_the_parts_of_make_lint() -> None:
    (line,) = re.findall(r"^lint: (.*?) ##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["entry"].split()[-1] for hook in hooks] == line.split()


def test_the_images_of_a_release_are_built_before() -> None:
    built = jobs("build.yml")["images"]["strategy"]["matrix"]["image"]
    published = [each["image"] for each in jobs("release.yml")["images"]["strategy"]["matrix"]["include"]]
    assert sorted(built) == sorted(published)
    assert set(built) <= set(Dockerfile(ROOT / "Dockerfile").stages)


def test_a_release_needs_every_check_and_no_secret() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text
    release = jobs("release.yml")
    for name in ("wheels", "images", "chart", "site"):
        assert set(release[name]["needs"]) == {"test", "build"}, name
    assert release["wheels"]["permissions"] == {"id-token": "write"}, "trusted publishing"

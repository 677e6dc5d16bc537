"""The overlays of deploy/kubernetes, each rendered once."""

from __future__ import annotations

import json
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.manifests.kustomize import render
from deploy.manifests.merge import Object
from tests.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "vllm")


@cache
def _rendered(name: str) -> list[Object]:
    return render(KUBERNETES / "overlays" / name)


def rendered(name: str) -> list[Object]:
    """Return the objects of an overlay, which the caller may change."""
    return deepcopy(_rendered(name))


def named(objects: list[Object], kind: str, name: str) -> Any:
    """Return the one object of this kind whose name is this one, or this one and a hash."""
    (found,) = (
        entry
        for entry in objects
        if entry["kind"] == kind and entry["metadata"]["name"] in (name, f"{name}-{_hash(entry)}")
    )
    return found


def _hash(entry: Object) -> str:
    return str(entry["metadata"]["name"]).rpartition("-")[2]


def kustomize_command() -> list[str] | None:
    """The command of a real kustomize, if this machine has one."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            return command
    return None


def built(command: list[str], folder: Path) -> list[Object]:
    """Render a folder by a real kustomize."""
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def by_name(objects: list[Object]) -> dict[tuple[str, str], Any]:
    """Return the objects by kind and name. Lists of mappings are sorted: their entries have keys, so order means
    nothing."""
    return {(entry["kind"], entry["metadata"]["name"]): _sorted(entry) for entry in objects}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        entries = [_sorted(entry) for entry in value]
        is_keyed = all(isinstance(entry, dict) for entry in entries)
        return sorted(entries, key=lambda entry: json.dumps(entry, sort_keys=True)) if is_keyed else entries
    return value

"""The manifests of deploy/kubernetes as kustomize renders them, and the pods, options and secrets in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.end_to_end.processes import run
from tests.paths import ROOT

Object: TypeAlias = dict[str, Any]
"""An object of Kubernetes as its YAML has it."""

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "vllm")
_KUBECTL = str(Path(sys.executable).with_name("kubectl"))
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}


@cache
def _built(folder: Path) -> list[Object]:
    done = run(_KUBECTL, "kustomize", str(folder))
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization, which the caller may change."""
    return deepcopy(_built(folder))


def rendered(overlay: str) -> list[Object]:
    return render(KUBERNETES / "overlays" / overlay)


def named(objects: Sequence[Object], kind: str, name: str) -> Any:
    (found,) = (
        entry
        for entry in objects
        if entry["kind"] == kind and re.fullmatch(rf"{name}(-[a-z0-9]{{10}})?", entry["metadata"]["name"])
    )
    return found


def quantity(text: object) -> float:
    """The number that a quantity such as 500m or 2Gi stands for."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    assert match, text
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Workload:
    """A Deployment."""

    manifest: Object

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def pod(self) -> Object:
        spec: Object = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def containers(self) -> list[Object]:
        """All containers, those that prepare the pod first."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.manifest["spec"]["template"]["metadata"].get("labels", {})
        return found

    @cached_property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        entries = [port for container in self.pod["containers"] for port in container.get("ports", [])]
        return {port["name"]: port["containerPort"] for port in entries}


class Manifests:
    """Objects that are applied together."""

    def __init__(self, objects: Sequence[Object]) -> None:
        self.objects = objects
        self.workloads = [Workload(entry) for entry in self.of("Deployment")]

    def of(self, kind: str) -> list[Object]:
        return [entry for entry in self.objects if entry["kind"] == kind]

    def named(self, kind: str, name: str) -> Object | None:
        return next((entry for entry in self.of(kind) if entry["metadata"]["name"] == name), None)

    def selected(self, selector: Object) -> list[Workload]:
        """The workloads whose pods a selector of labels means."""
        wanted = selector.get("matchLabels", {}).items()
        return [workload for workload in self.workloads if wanted <= workload.labels.items()]

    def options(self, workload: Workload) -> dict[str, str]:
        """The variables that ConfigMaps give to a workload's containers."""
        found: dict[str, str] = {}
        for container in workload.containers:
            for source in container.get("envFrom", []):
                config_map = self.named("ConfigMap", source["configMapRef"]["name"])
                assert config_map is not None, source
                found |= config_map["data"]
        return found

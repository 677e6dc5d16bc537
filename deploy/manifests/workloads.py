"""Finds what manifests refer to: the pods that a selector means, their ports, their environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from deploy.manifests.merge import Object
from deploy.manifests.pods import containers_of


@dataclass(frozen=True)
class Workload:
    """A Deployment."""

    manifest: Object

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def pod(self) -> Object:
        """The `spec` of its pods."""
        spec: Object = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods."""
        found: dict[str, str] = self.manifest["spec"]["template"]["metadata"].get("labels", {})
        return found

    @cached_property
    def ports(self) -> dict[str, int]:
        """The ports of its containers by name."""
        entries = [port for container in self.pod["containers"] for port in container.get("ports", [])]
        return {port["name"]: port["containerPort"] for port in entries}

    def has_port(self, port: object) -> bool:
        """True if this is the name or the number of one of its ports."""
        return port in self.ports or port in self.ports.values()


class Manifests:
    """Objects that are applied together."""

    def __init__(self, objects: Sequence[Object]) -> None:
        self.objects = objects
        self.workloads = [Workload(entry) for entry in self.of("Deployment")]

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [entry for entry in self.objects if entry.get("kind") == kind]

    def named(self, kind: str, name: str) -> Object | None:
        """The object of this kind and name."""
        return next((entry for entry in self.of(kind) if entry["metadata"]["name"] == name), None)

    def selected(self, selector: Object) -> list[Workload]:
        """The workloads whose pods a selector of labels means."""
        wanted = selector.get("matchLabels", {}).items()
        return [workload for workload in self.workloads if wanted <= workload.labels.items()]

    def options(self, workload: Workload) -> dict[str, str]:
        """The variables that ConfigMaps give to a workload's containers."""
        found: dict[str, str] = {}
        for container in containers_of(workload.pod):
            for source in container.get("envFrom", []):
                config_map = self.named("ConfigMap", source.get("configMapRef", {}).get("name", ""))
                found |= config_map["data"] if config_map is not None else {}
        return found

    @property
    def claimed_secrets(self) -> Iterator[str]:
        """Names of the secrets that cert-manager fills."""
        return (entry["spec"]["secretName"] for entry in self.of("Certificate"))

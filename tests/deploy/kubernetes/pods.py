"""Pods of rendered manifests, run as containers of the kernel's own namespaces: what kubelet and cluster would do.

Played: init containers, commands, users, environments, volumes, read-only roots, probes, and the names of Services,
which have the addresses of the pods that are ready. Not played: network policies, limits, the scheduler, eviction.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.containers import Container, Network, container, network
from tests.deploy.images import Image
from tests.deploy.kubernetes.rendered import Manifests, Object, Workload, quantity
from tests.end_to_end.processes import START_SECONDS, until

Secrets = Mapping[str, Mapping[str, bytes]]
"""Files of each Secret."""


class Pod:
    """A running pod."""

    def __init__(self, workload: Workload, main: Container, spec: Object) -> None:
        self.workload = workload
        self.main = main
        self._spec = spec
        self.is_ready = False

    @property
    def questions(self) -> list[Object]:
        """What its probes ask, each question once: their patience differs more than what they ask."""
        found: list[Object] = []
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            question = {kind: self._spec[name][kind] for kind in ("exec", "grpc") if kind in self._spec[name]}
            assert question, f"{name} cannot be played"
            found += [question] if question not in found else []
        return found

    def passes(self, question: Object) -> bool:
        """Ask as the kubelet does: a gRPC probe dials the pod's address."""
        if "exec" in question:
            return self.main.run(*question["exec"]["command"]).returncode == 0
        address = f"{self.main.address}:{question['grpc']['port']}"
        return self.main.run("python", "-P", "-m", "tandem.serving.healthcheck", address).returncode == 0


class Namespace:
    """The pods of a namespace."""

    def __init__(
        self, objects: list[Object], images: Mapping[str, Image], secrets: Secrets, folder: Path
    ) -> None:
        self.manifests = Manifests(objects)
        self.pods: dict[str, list[Pod]] = {}
        self._images = images
        self._secrets = secrets
        self._folder = folder
        self._stack = ExitStack()
        self._net: Network | None = None

    def __enter__(self) -> Namespace:
        """Start every pod at once, as a cluster does."""
        try:
            self._net = self._stack.enter_context(network(self._folder))
            for workload in self.manifests.workloads:
                for _ in range(workload.manifest["spec"].get("replicas", 1)):
                    self.start(workload)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        self._stack.close()

    def start(self, workload: Workload) -> Pod:
        """Start one more pod: its init containers to their ends, then its only container."""
        assert self._net is not None
        pods = self.pods.setdefault(workload.name, [])
        name = f"{workload.name}-{len(pods)}"
        folders = self._volumes(workload.pod, self._folder / f"{name}-volumes")
        for spec in workload.pod.get("initContainers", []):
            with self._container(f"{name}-{spec['name']}", workload, spec, folders) as first:
                assert first.process.wait(START_SECONDS) == 0, first.process.story
        (spec,) = workload.pod["containers"]
        main = self._stack.enter_context(self._container(name, workload, spec, folders))
        pods.append(pod := Pod(workload, main, spec))
        return pod

    def await_ready(self, pod: Pod) -> None:
        """Wait for its startup and readiness; from then on it is found under the names of its Services."""
        assert self._net is not None
        process = pod.main.process
        until(
            lambda: "ready on " in process.stdout or process.has_ended, START_SECONDS, lambda: process.story
        )
        for asked in pod.questions:
            assert pod.passes(asked), f"{asked}\n{process.story}"
        pod.is_ready = True
        self._net.add(pod.main.address, self.service_names(pod.workload))

    def service_names(self, workload: Workload) -> list[str]:
        """Names of the Services that lead to a workload, each with the very ports of its containers."""
        found = []
        for service in self.manifests.of("Service"):
            if service["spec"]["selector"].items() <= workload.labels.items():
                for port in service["spec"]["ports"]:
                    assert port["port"] == workload.ports[port["targetPort"]], (
                        "a name server changes no ports"
                    )
                found.append(service["metadata"]["name"])
        return found

    @contextmanager
    def _container(
        self, name: str, workload: Workload, spec: Object, folders: Mapping[str, str]
    ) -> Iterator[Container]:
        assert self._net is not None
        image = self._images[spec["image"].removeprefix("tandem/").partition(":")[0]]
        context = workload.pod["securityContext"] | spec["securityContext"]
        kinds = {volume["name"]: volume for volume in workload.pod["volumes"]}
        mounts = [(mount, kinds[mount["name"]]) for mount in spec["volumeMounts"]]
        described = {
            "user": f"{context['runAsUser']}:{context['runAsGroup']}",
            "environment": self._environment(workload, spec),
            "read_only": context["readOnlyRootFilesystem"],
            "entrypoint": spec.get("command", image.entrypoint),
            "command": spec.get("args", []),
            "healthcheck": {"test": ["CMD", *image.health_check]},
            "tmpfs": [
                f"{mount['mountPath']}:mode=1777,size={quantity(volume['emptyDir']['sizeLimit']):.0f}"
                for mount, volume in mounts
                if _is_in_memory(volume)
            ],
            "volumes": [
                f"{folders[mount['name']]}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'}"
                for mount, volume in mounts
                if not _is_in_memory(volume)
            ],
        }
        with container(name, described, image, self._net, self._folder) as running:
            yield running

    def _environment(self, workload: Workload, spec: Object) -> dict[str, str]:
        found = self.manifests.options(workload) if "envFrom" in spec else {}
        for entry in spec.get("env", []):
            value = entry["value"] if "value" in entry else self._value(spec, entry["valueFrom"])
            if value is not None:
                found[entry["name"]] = value
        return found

    def _value(self, spec: Object, origin: Object) -> str | None:
        if key := origin.get("configMapKeyRef"):
            config_map = self.manifests.named("ConfigMap", key["name"])
            assert config_map is not None
            return str(config_map["data"][key["key"]])
        if key := origin.get("secretKeyRef"):
            if key["name"] not in self._secrets:
                assert key.get("optional"), f"there is no Secret {key['name']}"
                return None
            return self._secrets[key["name"]][key["key"]].decode()
        kind, name = origin["resourceFieldRef"]["resource"].split(".")
        return str(math.ceil(quantity(spec["resources"][kind][name])))

    def _volumes(self, pod: Object, folder: Path) -> dict[str, str]:
        """Make a folder for each volume, with the owner and the modes that the kubelet gives it."""
        group = pod["securityContext"]["fsGroup"]
        folders = {}
        for volume in pod["volumes"]:
            place = folder / volume["name"]
            place.mkdir(parents=True)
            os.chown(place, 0, group)
            place.chmod(0o2777)
            folders[volume["name"]] = str(place)
            secret: dict[str, Any] | None = volume.get("secret")
            assert secret or "emptyDir" in volume, f"{volume} cannot be played"
            for name, content in (self._secrets[secret["secretName"]] if secret else {}).items():
                (place / name).write_bytes(content)
                os.chown(place / name, 0, group)
                (place / name).chmod(secret["defaultMode"] if secret else 0)
        return folders


def _is_in_memory(volume: Object) -> bool:
    return bool(volume.get("emptyDir", {}).get("medium") == "Memory")

"""The policy for pods: what each container may do, what it may take, and how it begins and ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deploy.manifests.merge import Object

_DEFAULT_DRAIN_SECONDS = 30.0
"""`drain_timeout_seconds` where no option sets it."""
_PATIENCE_SECONDS = 300
"""A liveness probe must fail for at least this long before it restarts a container that may only be busy."""
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def quantity(text: object) -> float:
    """The number that a quantity such as 500m or 2Gi stands for.

    Raises:
        ValueError: it is no quantity.
    """
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text} is no quantity")
    return float(match[1]) * _UNITS[match[2]]


def containers_of(pod: Object) -> list[Object]:
    """All containers of a pod, those that prepare it first."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def pod_faults(pod: Object, options: dict[str, str]) -> Iterator[str]:
    """Everything about a pod that breaks the policy.

    Args:
        pod: The `spec` of a pod template.
        options: What its ConfigMaps give to its environment.
    """
    yield from _shared_faults(pod)
    for container in containers_of(pod):
        for fault in (*_confinement_faults(pod, container), *_resource_faults(container)):
            yield f"container {container['name']}: {fault}"
    for container in pod["containers"]:
        for fault in (*_probe_faults(container), *_end_faults(pod, container, options)):
            yield f"container {container['name']}: {fault}"
    yield from _volume_faults(pod)


def _shared_faults(pod: Object) -> Iterator[str]:
    for field in ("automountServiceAccountToken", "enableServiceLinks"):
        if pod.get(field) is not False:
            yield f"{field} is {pod.get(field, 'not set')}; it must be false"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is true; a pod must not share it with its node"
    context = pod.get("securityContext", {})
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "seccompProfile is not RuntimeDefault"
    if "fsGroup" not in context:
        yield "fsGroup is not set, so its user could not read mounted secrets"


def _confinement_faults(pod: Object, container: Object) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = pod.get("securityContext", {}) | own
    if both.get("runAsNonRoot") is not True or not both.get("runAsUser"):
        yield f"runAsUser is {both.get('runAsUser', 'not set')}; it must be a user other than root, with runAsNonRoot"
    wanted = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    for field, value in wanted.items():
        if own.get(field) is not value:
            yield f"{field} is {own.get(field, 'not set')}; it must be {str(value).lower()}"
    if own.get("privileged"):
        yield "it is privileged"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield f"its capabilities are {capabilities or 'the default'}; all must be dropped and none added"
    if not re.search(r":\d+\.\d+\.\d+", container["image"]):
        yield f"image {container['image']} has no exact tag, so it may be another one tomorrow"


def _resource_faults(container: Object) -> Iterator[str]:
    requests, limits = (container.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
    for name in _RESOURCES:
        if name not in requests or name not in limits:
            yield f"{name} has no {'request' if name in limits else 'limit'}"
        elif quantity(requests[name]) > quantity(limits[name]):
            yield f"{name} is requested with {requests[name]}, above its limit {limits[name]}"
    if requests.get("memory") != limits.get("memory"):
        yield "memory's request differs from its limit, so the node may run out of it first"


def _probe_faults(container: Object) -> Iterator[str]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name)
        if probe is None:
            yield f"it has no {name}"
        elif probe.get("timeoutSeconds", 1) > probe.get("periodSeconds", 10):
            yield f"{name} may take longer than its period"
    live = container.get("livenessProbe", {})
    patience = live.get("periodSeconds", 10) * live.get("failureThreshold", 3)
    if patience < _PATIENCE_SECONDS:
        yield f"livenessProbe restarts it after {patience} s; it may only be busy: at least {_PATIENCE_SECONDS} s"


def _end_faults(pod: Object, container: Object, options: dict[str, str]) -> Iterator[str]:
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    name = f"TANDEM_{container['name'].upper()}_DRAIN_TIMEOUT_SECONDS"
    values = options | {entry["name"]: entry.get("value") for entry in container.get("env", [])}
    # A container that drains by sleeping alone reads none of our options.
    reads_options = container.get("envFrom") is not None
    drain = float(values.get(name, _DEFAULT_DRAIN_SECONDS)) if reads_options else 0.0
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if grace <= sleep + drain:
        yield (
            f"terminationGracePeriodSeconds is {grace}; it must be more than the {sleep} s before SIGTERM and the "
            f"{drain:g} s of the drain"
        )


def _volume_faults(pod: Object) -> Iterator[str]:
    volumes: dict[str, Object] = {volume["name"]: volume for volume in pod.get("volumes", [])}
    mounted: set[str] = set()
    for container in containers_of(pod):
        mounts: list[Any] = container.get("volumeMounts", [])
        mounted |= {mount["name"] for mount in mounts}
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"container {container['name']}: volume {mount['name']} is mounted, but there is none"
    for name, volume in volumes.items():
        if name not in mounted:
            yield f"volume {name} is mounted nowhere"
        if "hostPath" in volume:
            yield f"volume {name} is a folder of the node"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {name} has no sizeLimit"
    in_memory = sum(
        quantity(volume["emptyDir"].get("sizeLimit", 0))
        for volume in volumes.values()
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    limits = [container.get("resources", {}).get("limits", {}) for container in pod["containers"]]
    if in_memory >= sum(quantity(limit.get("memory", 0)) for limit in limits):
        yield "its volumes in memory may take all of its memory"

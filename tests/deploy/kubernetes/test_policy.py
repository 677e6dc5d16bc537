"""Rules that the manifests keep: their schemas, what pods may do and take, and that every reference leads somewhere.

`KUBERNETES_FOLDER=my-overlay make kubernetes` checks a kustomization of one's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.kubernetes.rendered import (
    KUBERNETES,
    OVERLAYS,
    Manifests,
    Workload,
    named,
    quantity,
    render,
    rendered,
)

OWN = os.environ.get("KUBERNETES_FOLDER")
OURS = [*(KUBERNETES / "overlays" / name for name in OVERLAYS), Path(__file__).parent / "cpu_tls"]
GIVEN_SECRETS = {"tandem-admin", "tandem-services", "tandem-tokens", "vllm-api-key"}
"""Made by whoever applies the manifests; the overlays say how."""
PATIENCE_SECONDS = 300
"""A liveness probe must fail for at least this long before it restarts a container that may only be busy."""
POD = "spec.template.spec"
MAIN = f"{POD}.containers.0"


def faults(objects: list[dict[str, Any]], given: Set[str] = GIVEN_SECRETS) -> Iterator[str]:
    """A few words for each fault; `given` names the Secrets of whoever applies them."""
    manifests = Manifests(objects)
    for entry in objects:
        if re.match(r"[^.]*/|v1$|.*\.k8s\.io/", entry["apiVersion"]):  # the others are custom resources
            yield from _schema_faults(json.dumps(entry))
        if entry["kind"] != "Namespace" and "namespace" not in entry["metadata"]:
            yield f"no namespace: {entry['kind']}"
    for workload in manifests.workloads:
        for container in workload.containers:
            yield from _confinement(workload, container)
            yield from _resources(container)
        for container in workload.pod["containers"]:
            yield from _life(manifests, workload, container)
            yield from _gpus(container)
        yield from _environment(manifests, workload)
        yield from _references(manifests, workload, given)
    yield from _selectors(manifests)


@cache
def _schema_faults(text: str) -> list[str]:
    """Of one object, as JSON: those that differ in one object share the others."""
    entry = json.loads(text)
    try:
        kubernetes_validate.validate(entry, "1.37", strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [f"schema of {entry['kind']}: {error}"]
    return []


def _confinement(workload: Workload, container: dict[str, Any]) -> Iterator[str]:
    pod = workload.pod
    own = container.get("securityContext", {})
    both = pod.get("securityContext", {}) | own
    is_right = {
        "another user than root": both.get("runAsNonRoot") is True
        and both.get("runAsUser", 0) != 0
        and "fsGroup" in both,
        "seccompProfile": both.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        "privileges": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
        "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "nothing of the node": not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")),
        "no token": pod.get("automountServiceAccountToken") is False
        and pod.get("enableServiceLinks") is False,
        "exact tag": re.search(r":v?\d+\.\d+\.\d+", container["image"]),
    }
    yield from (f"{workload.name}: {words}" for words, right in is_right.items() if not right)


def _resources(container: dict[str, Any]) -> Iterator[str]:
    requests, limits = (container.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
    for name in ("cpu", "memory", "ephemeral-storage"):
        if name not in requests or name not in limits or quantity(requests[name]) > quantity(limits[name]):
            yield f"{name} of {container['name']}"
    if requests.get("memory") != limits.get("memory"):
        yield f"memory of {container['name']} is promised to others"


def _life(manifests: Manifests, workload: Workload, container: dict[str, Any]) -> Iterator[str]:
    ports = {*workload.ports, *workload.ports.values()}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name, {})
        asked = probe.get("grpc", probe.get("httpGet", {})).get("port")
        if command := probe.get("exec", {}).get("command"):
            asked = int(command[-1].rpartition(":")[2])
        if asked not in ports or probe.get("timeoutSeconds", 1) > probe.get("periodSeconds", 10):
            yield f"{name} of {container['name']}"
    live = container.get("livenessProbe", {})
    if live.get("periodSeconds", 10) * live.get("failureThreshold", 3) < PATIENCE_SECONDS:
        yield f"livenessProbe of {container['name']} is impatient"
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    option = f"TANDEM_{container['name'].upper()}_DRAIN_TIMEOUT_SECONDS"
    drain = float(manifests.options(workload).get(option, 30.0)) if "envFrom" in container else 0.0
    if workload.pod.get("terminationGracePeriodSeconds", 30) <= sleep + drain:
        yield f"{container['name']} is killed while it drains"


def _gpus(container: dict[str, Any]) -> Iterator[str]:
    """A model is split over all of its container's GPUs, whose processes need shared memory of their own."""
    gpus = int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
    values = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
    options = [words.rpartition("=")[2] for words in container.get("args", []) if "parallel-size" in words]
    sizes = [values[name] for name in values if name.endswith("_TENSOR_PARALLEL_SIZE")] + options
    if gpus and (sizes or ["1"]) != [str(gpus)]:
        yield f"{container['name']} has {gpus} GPUs"
    if gpus > 1 and "/dev/shm" not in {mount["mountPath"] for mount in container["volumeMounts"]}:
        yield f"shared memory of {container['name']}"


def _environment(manifests: Manifests, workload: Workload) -> Iterator[str]:
    certified = {name for entry in manifests.of("Certificate") for name in entry["spec"].get("dnsNames", [])}
    for entry in (entry for container in workload.containers for entry in container.get("env", [])):
        if key := entry.get("valueFrom", {}).get("configMapKeyRef"):
            config_map = manifests.named("ConfigMap", key["name"])
            if config_map is None or key["key"] not in config_map["data"]:
                yield f"no key for {entry['name']}"
        if re.fullmatch(r"TANDEM_[A-Z]+_(TARGET|DRAFT)_ADDRESS", entry["name"]):
            host, _, port = entry["value"].rpartition(":")
            spec = (manifests.named("Service", host) or {"spec": {"ports": []}})["spec"]
            ports = [each["port"] for each in spec["ports"]]
            if spec.get("clusterIP") != "None" or int(port) not in ports:
                yield f"no headless Service for {entry['name']}"
            if certified and host not in certified:
                yield f"no certificate for {host}"


def _references(manifests: Manifests, workload: Workload, given: Set[str]) -> Iterator[str]:
    secrets = {entry["spec"]["secretName"] for entry in manifests.of("Certificate")} | given
    secrets |= {entry["metadata"]["name"] for entry in manifests.of("Secret")}
    # An optional one may be missing.
    named = set(
        re.findall(
            r"'secretKeyRef': {(?![^}]*'optional': True)[^}]*'name': '([^']+)'|'secretName': '([^']+)'",
            str(workload.pod),
        )
    )
    yield from (f"no Secret {name}" for name in {name for pair in named for name in pair if name} - secrets)
    for volume in workload.pod.get("volumes", []):
        if "hostPath" in volume or "sizeLimit" not in volume.get("emptyDir", {"sizeLimit": 0}):
            yield f"volume {volume['name']} has no bound"
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and manifests.named("PersistentVolumeClaim", claim) is None:
            yield f"no PersistentVolumeClaim {claim}"
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        if not any(workload in manifests.selected(entry["spec"][field]) for entry in manifests.of(kind)):
            yield f"no {kind} for {workload.name}"


def _selectors(manifests: Manifests) -> Iterator[str]:
    for entry in manifests.of("Service"):
        found = manifests.selected({"matchLabels": entry["spec"]["selector"]})
        wanted = {port["targetPort"] for port in entry["spec"]["ports"]}
        if len(found) != 1 or not wanted <= {*found[0].ports, *found[0].ports.values()}:
            yield f"Service {entry['metadata']['name']}"
    for entry in manifests.of("NetworkPolicy"):
        selectors = [entry["spec"]["podSelector"]]
        for rule in entry["spec"].get("ingress", []):
            peers = rule.get("from") or [{"podSelector": {"matchLabels": {"no peer": "allows all"}}}]
            selectors += [peer["podSelector"] for peer in peers if peer.keys() == {"podSelector"}]
        if not all(map(manifests.selected, selectors)):
            yield f"NetworkPolicy {entry['metadata']['name']}"
    for entry in manifests.of("HorizontalPodAutoscaler"):
        scaled = manifests.named("Deployment", entry["spec"]["scaleTargetRef"]["name"])
        if scaled is None or "replicas" in scaled["spec"]:
            yield f"HorizontalPodAutoscaler {entry['metadata']['name']}"


@pytest.mark.parametrize("folder", [Path(OWN)] if OWN else OURS, ids=lambda folder: folder.name)
def test_an_overlay_has_no_fault(folder: Path) -> None:
    assert list(faults(render(folder))) == []


@pytest.mark.parametrize(
    ("overlay", "identity", "path", "value", "words"),
    [
        ("cpu", "Deployment/draft", f"{POD}.securityContext.runAsUser", 0, "another user than root"),
        ("cpu", "Deployment/draft", f"{MAIN}.securityContext.capabilities", {"drop": []}, "capabilities"),
        ("cpu", "Deployment/draft", f"{MAIN}.image", "tandem/draft:latest", "exact tag"),
        ("cpu", "Deployment/draft", f"{MAIN}.resources.requests.memory", "1Mi", "promised to others"),
        ("cpu", "Deployment/draft", f"{MAIN}.readinessprobe", {}, "schema of Deployment"),
        ("cpu", "Deployment/draft", f"{MAIN}.readinessProbe", {"grpc": {"port": 1}}, "readinessProbe"),
        ("cpu", "Deployment/draft", f"{POD}.terminationGracePeriodSeconds", 30, "killed while it drains"),
        ("cpu", "Deployment/coordinator", f"{MAIN}.env.0.value", "targets:50052", "no headless Service"),
        ("cpu", "Service/draft", "spec.selector", {"app": "nobody"}, "Service draft"),
        ("cpu", "NetworkPolicy/draft", "spec.ingress.0.from", [], "NetworkPolicy draft"),
        ("cpu", "ConfigMap/tandem-models", "data", {}, "no key"),
        ("gpu", "Deployment/target", f"{MAIN}.resources.limits", {"nvidia.com/gpu": 4}, "target has 4 GPUs"),
        ("gpu", "Deployment/target", f"{MAIN}.env", [], "target has 2 GPUs"),
        ("gpu", "Deployment/target", f"{MAIN}.volumeMounts", [], "shared memory of target"),
    ],
)
def test_a_fault_is_found(overlay: str, identity: str, path: str, value: object, words: str) -> None:
    objects = rendered(overlay)
    entry = named(objects, *identity.split("/"))
    *parents, last = path.split(".")
    for key in parents:
        entry = entry[int(key) if isinstance(entry, list) else key]
    entry[last] = value
    assert any(words in fault for fault in faults(objects)), list(faults(objects))

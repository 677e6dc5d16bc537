"""References between manifests: everything that one names must be there, with the port or the key that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploy.manifests.merge import Object
from deploy.manifests.pods import containers_of
from deploy.manifests.workloads import Manifests, Workload

GIVEN_SECRETS = frozenset(("tandem-admin", "tandem-tokens", "vllm-api-key"))
"""Secrets that whoever applies the manifests makes beforehand; the overlays say how."""


def workload_faults(manifests: Manifests, workload: Workload) -> Iterator[str]:
    """References of a Deployment that lead nowhere."""
    selector = workload.manifest["spec"]["selector"]
    if workload not in manifests.selected(selector):
        yield "its selector does not mean its own pods"
    for container in containers_of(workload.pod):
        for fault in (
            *_environment_faults(manifests, container),
            *_address_faults(manifests, container),
            *_probe_port_faults(container),
        ):
            yield f"container {container['name']}: {fault}"
    for volume in workload.pod.get("volumes", []):
        yield from _volume_source_faults(manifests, volume)
    yield from _coverage_faults(manifests, workload)


def _environment_faults(manifests: Manifests, container: Object) -> Iterator[str]:
    for source in container.get("envFrom", []):
        if manifests.named("ConfigMap", name := source["configMapRef"]["name"]) is None:
            yield f"there is no ConfigMap {name}"
    names = [entry["name"] for entry in container.get("env", [])]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name} is set twice"
    for entry in container.get("env", []):
        origin = entry.get("valueFrom", {})
        if key := origin.get("configMapKeyRef"):
            config_map = manifests.named("ConfigMap", key["name"])
            if config_map is None or key["key"] not in config_map["data"]:
                yield f"{entry['name']}: ConfigMap {key['name']} has no key {key['key']}"
        if key := origin.get("secretKeyRef"):
            yield from _secret_faults(manifests, key["name"], f"{entry['name']}: ")


def _secret_faults(manifests: Manifests, name: str, place: str) -> Iterator[str]:
    if name not in GIVEN_SECRETS and name not in manifests.claimed_secrets:
        yield f"{place}nothing makes a Secret {name}"


def _address_faults(manifests: Manifests, container: Object) -> Iterator[str]:
    """Check that services find all replicas of each other."""
    for entry in container.get("env", []):
        if not re.fullmatch(r"TANDEM_[A-Z]+_(TARGET|DRAFT)_ADDRESS", entry["name"]):
            continue
        host, _, port = entry["value"].rpartition(":")
        service = manifests.named("Service", host)
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"{entry['name']} is {entry['value']}: there is no headless Service {host}"
        elif int(port) not in [each["port"] for each in service["spec"]["ports"]]:
            yield f"{entry['name']} is {entry['value']}: Service {host} has no port {port}"
        elif manifests.of("Certificate") and host not in _certified(manifests):
            yield f"{entry['name']} is {entry['value']}: no certificate is for {host}"


def _certified(manifests: Manifests) -> set[str]:
    entries = [entry["spec"].get("dnsNames", []) for entry in manifests.of("Certificate")]
    return {name for names in entries for name in names}


def _probe_port_faults(container: Object) -> Iterator[str]:
    ports = container.get("ports", [])
    numbers = {port["containerPort"] for port in ports}
    names = {port.get("name") for port in ports}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name, {})
        asked = probe.get("grpc", {}).get("port") or probe.get("httpGet", {}).get("port")
        if command := probe.get("exec", {}).get("command"):
            asked = int(command[-1].rpartition(":")[2])
        if asked is not None and asked not in numbers | names:
            yield f"{name} asks at port {asked}, which it does not have"


def _volume_source_faults(manifests: Manifests, volume: Object) -> Iterator[str]:
    place = f"volume {volume['name']}: "
    if "secret" in volume:
        yield from _secret_faults(manifests, volume["secret"]["secretName"], place)
    if "configMap" in volume and manifests.named("ConfigMap", volume["configMap"]["name"]) is None:
        yield f"{place}there is no ConfigMap {volume['configMap']['name']}"
    if claim := volume.get("persistentVolumeClaim"):
        found = manifests.named("PersistentVolumeClaim", claim["claimName"])
        if found is None:
            yield f"{place}there is no PersistentVolumeClaim {claim['claimName']}"


def _coverage_faults(manifests: Manifests, workload: Workload) -> Iterator[str]:
    """A workload needs a disruption budget, and policies for both directions of its traffic."""
    budgets = [entry for entry in manifests.of("PodDisruptionBudget") if _means(manifests, entry, workload)]
    if len(budgets) != 1:
        yield f"{len(budgets)} PodDisruptionBudgets are for it; there must be one"
    policies = [
        entry
        for entry in manifests.of("NetworkPolicy")
        if workload in manifests.selected(entry["spec"]["podSelector"])
    ]
    for direction in ("Ingress", "Egress"):
        if not any(direction in policy["spec"]["policyTypes"] for policy in policies):
            yield f"no NetworkPolicy bounds its {direction.lower()}"


def _means(manifests: Manifests, entry: Object, workload: Workload) -> bool:
    return workload in manifests.selected(entry["spec"]["selector"])

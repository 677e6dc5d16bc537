"""Selectors: a Service, a budget, a policy, an autoscaler or a monitor must mean pods that have the ports it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from deploy.manifests.merge import Object
from deploy.manifests.workloads import Manifests, Workload


def selector_faults(manifests: Manifests, entry: Object) -> Iterator[str]:
    """Selectors of an object that mean nothing, and ports that nothing has."""
    check = _CHECKS.get(entry["kind"])
    if check is not None:
        yield from check(manifests, entry["spec"])


def _service(manifests: Manifests, spec: Object) -> Iterator[str]:
    found = manifests.selected({"matchLabels": spec["selector"]})
    if len(found) != 1:
        yield f"its selector means {len(found)} workloads; it must be one"
    for port in spec["ports"]:
        yield from _port_faults(found, port["targetPort"])


def _budget(manifests: Manifests, spec: Object) -> Iterator[str]:
    if not manifests.selected(spec["selector"]):
        yield "its selector means no pods"
    if spec.get("maxUnavailable") == 0 or spec.get("minAvailable") == "100%":
        yield "it allows no eviction, so no node could be drained"


def _policy(manifests: Manifests, spec: Object) -> Iterator[str]:
    own = manifests.selected(spec["podSelector"])
    if not own:
        yield "its podSelector means no pods"
    for rule in spec.get("ingress", []):
        yield from _peer_faults(manifests, rule.get("from", []))
        for port in rule.get("ports", []):
            yield from _port_faults(own, port["port"])
    for rule in spec.get("egress", []):
        yield from _peer_faults(manifests, rule.get("to", []))
        peers = [
            each
            for peer in rule["to"]
            if "podSelector" in peer
            for each in manifests.selected(peer["podSelector"])
        ]
        for port in rule["ports"]:
            yield from _port_faults(peers, port["port"]) if peers else ()


def _peer_faults(manifests: Manifests, peers: Sequence[Object]) -> Iterator[str]:
    if not peers:
        yield "a rule names no peer, so it allows all"
    for peer in peers:
        is_own = "podSelector" in peer and "namespaceSelector" not in peer
        if is_own and not manifests.selected(peer["podSelector"]):
            yield f"the peer {peer['podSelector']['matchLabels']} means no pods"


def _port_faults(workloads: Sequence[Workload], port: object) -> Iterator[str]:
    if not any(workload.has_port(port) for workload in workloads):
        yield f"no pod that it means has the port {port}"


def _autoscaler(manifests: Manifests, spec: Object) -> Iterator[str]:
    reference = spec["scaleTargetRef"]
    scaled = manifests.named(reference["kind"], reference["name"])
    if scaled is None:
        yield f"there is no {reference['kind']} {reference['name']}"
    elif "replicas" in scaled["spec"]:
        yield f"{reference['name']} sets replicas, so applying it would undo the autoscaler's decision"
    if spec["minReplicas"] > spec["maxReplicas"]:
        yield f"minReplicas is {spec['minReplicas']}, above maxReplicas {spec['maxReplicas']}"


def _monitor(manifests: Manifests, spec: Object) -> Iterator[str]:
    wanted = spec["selector"]["matchLabels"].items()
    services = [
        entry for entry in manifests.of("Service") if wanted <= entry["metadata"].get("labels", {}).items()
    ]
    ports = {port["name"] for service in services for port in service["spec"]["ports"]}
    for endpoint in spec["endpoints"]:
        if endpoint["port"] not in ports:
            yield f"no Service that it means has a port {endpoint['port']}"


def _certificate(manifests: Manifests, spec: Object) -> Iterator[str]:
    issuer = spec["issuerRef"]
    if issuer.get("kind", "Issuer") == "Issuer" and manifests.named("Issuer", issuer["name"]) is None:
        yield f"there is no Issuer {issuer['name']}"


def _issuer(manifests: Manifests, spec: Object) -> Iterator[str]:
    name = spec.get("ca", {}).get("secretName")
    if name is not None and name not in manifests.claimed_secrets:
        yield f"nothing makes a Secret {name}"


_CHECKS: dict[str, Callable[[Manifests, Object], Iterator[str]]] = {
    "Service": _service,
    "PodDisruptionBudget": _budget,
    "NetworkPolicy": _policy,
    "HorizontalPodAutoscaler": _autoscaler,
    "ServiceMonitor": _monitor,
    "Certificate": _certificate,
    "Issuer": _issuer,
}

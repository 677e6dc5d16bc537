"""Every fault that the checks know is found: manifests are broken one at a time, and the sentence says how."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.manifests.checks import faults
from deploy.manifests.pods import quantity
from tests.deploy.kubernetes.rendered import OVERLAYS, named, rendered

GONE = object()
"""In the place of a value: the field is deleted."""
WORKLOADS = (("cpu", "draft"), ("gpu", "target"), ("gpu", "coordinator"), ("vllm", "vllm"))
POD = "spec.template.spec"
CONTAINER = f"{POD}.containers.0"


def changed(entry: Any, path: str, value: object) -> None:
    """Set the field at a path of keys and indices, or delete it."""
    *parents, last = path.split(".")
    for key in parents:
        entry = entry[int(key)] if isinstance(entry, list) else entry[key]
    if value is GONE:
        del entry[last]
    elif isinstance(entry, list):
        entry[int(last)] = value
    else:
        entry[last] = value


IN_EVERY_WORKLOAD = [
    (f"{POD}.securityContext.runAsUser", 0, "runAsUser is 0; it must be a user other than root"),
    (f"{POD}.securityContext.runAsUser", GONE, "runAsUser is not set"),
    (f"{CONTAINER}.securityContext.runAsNonRoot", False, "it must be a user other than root"),
    (f"{CONTAINER}.securityContext.runAsUser", 0, "runAsUser is 0"),
    (f"{CONTAINER}.securityContext.readOnlyRootFilesystem", False, "readOnlyRootFilesystem is False"),
    (f"{CONTAINER}.securityContext.allowPrivilegeEscalation", GONE, "allowPrivilegeEscalation is not set"),
    (f"{CONTAINER}.securityContext.privileged", True, "it is privileged"),
    (f"{CONTAINER}.securityContext.capabilities", {"drop": ["NET_RAW"]}, "all must be dropped"),
    (f"{CONTAINER}.securityContext.capabilities.add", ["SYS_ADMIN"], "none added"),
    (f"{CONTAINER}.securityContext", GONE, "readOnlyRootFilesystem is not set"),
    (f"{POD}.securityContext.seccompProfile", {"type": "Unconfined"}, "seccompProfile is not RuntimeDefault"),
    (f"{POD}.securityContext.fsGroup", GONE, "fsGroup is not set"),
    (f"{POD}.hostNetwork", True, "hostNetwork is true"),
    (f"{POD}.automountServiceAccountToken", GONE, "automountServiceAccountToken is not set"),
    (f"{POD}.enableServiceLinks", GONE, "enableServiceLinks is not set"),
    (f"{CONTAINER}.resources.limits.memory", GONE, "memory has no limit"),
    (f"{CONTAINER}.resources.requests.cpu", GONE, "cpu has no request"),
    (f"{CONTAINER}.resources.requests.cpu", "64", "cpu is requested with 64, above its limit"),
    (f"{CONTAINER}.resources.requests.memory", "1Mi", "memory's request differs from its limit"),
    (f"{CONTAINER}.image", "tandem/draft:latest", "has no exact tag"),
    (f"{CONTAINER}.readinessProbe", GONE, "it has no readinessProbe"),
    (f"{CONTAINER}.livenessProbe.failureThreshold", 1, "livenessProbe restarts it after 30 s"),
    (f"{CONTAINER}.readinessProbe.timeoutSeconds", 60, "readinessProbe may take longer than its period"),
    (f"{POD}.terminationGracePeriodSeconds", 30, "terminationGracePeriodSeconds is 30; it must be more than"),
    (f"{POD}.volumes.0.hostPath", {"path": "/"}, "is a folder of the node"),
    (f"{CONTAINER}.volumeMounts.0.name", "nowhere", "volume nowhere is mounted, but there is none"),
    (f"{CONTAINER}.readinessProbe", {"grpc": {"port": 1}}, "readinessProbe asks at port 1"),
    ("spec.selector.matchLabels", {"app": "another"}, "selector does not mean its own pods"),
    (
        f"{CONTAINER}.readinessprobe",
        {},
        "Additional properties are not allowed ('readinessprobe' was unexpected)",
    ),
    (f"{POD}.containers.0.ports.0.containerPort", "grpc", "is not of type"),
    (f"{POD}.containers", "one", "is not of type"),
    ("metadata.namespace", GONE, "it has no namespace"),
    ("apiVersion", "apps/v9", "Deployment of apps/v9 is no kind of Kubernetes"),
]
"""A field of each Deployment, its wrong value, and the words that say so."""

IN_ONE = [
    ("cpu", "Service/draft", "spec.selector", {"app": "nobody"}, "its selector means 0 workloads"),
    ("cpu", "Service/draft", "spec.ports.0.targetPort", "rpc", "no pod that it means has the port rpc"),
    ("cpu", "Service/target", "spec.clusterIP", GONE, "there is no headless Service target"),
    ("cpu", "Service/target", "spec.ports.0.port", 50053, "Service target has no port 50052"),
    ("cpu", "Service/target", "spec.clusterIp", "None", "'clusterIp' was unexpected"),
    ("cpu", "Service/target", "metadata.name", "targets", "there is no headless Service target"),
    ("cpu", "PodDisruptionBudget/draft", "spec.selector.matchLabels", {"app": "x"}, "its selector means no pods"),
    ("cpu", "PodDisruptionBudget/draft", "spec.selector.matchLabels", {"app": "x"}, "0 PodDisruptionBudgets are"),
    ("cpu", "PodDisruptionBudget/draft", "spec.maxUnavailable", 0, "no node could be drained"),
    ("cpu", "NetworkPolicy/nothing-else", "spec.policyTypes", ["Ingress"], "no NetworkPolicy bounds its egress"),
    ("cpu", "NetworkPolicy/draft", "spec.podSelector.matchLabels", {"app": "x"}, "its podSelector means no pods"),
    ("cpu", "NetworkPolicy/draft", "spec.ingress.0.from", [], "a rule names no peer, so it allows all"),
    ("cpu", "NetworkPolicy/draft", "spec.ingress.0.ports.0.port", 50052, "no pod that it means has the port 50052"),
    (
        "cpu", "NetworkPolicy/draft", "spec.ingress.0.from.0.podSelector.matchLabels", {"app": "x"},
        "the peer {'app': 'x'} means no pods",
    ),
    ("cpu", "NetworkPolicy/coordinator", "spec.egress.0.ports.0.port", 1, "no pod that it means has the port 1"),
    ("cpu", "ConfigMap/tandem-models", "data.draft", GONE, "has no key draft"),
    ("cpu", "ConfigMap/tandem-models", "metadata.name", "renamed", "has no key target"),
    ("cpu", "ConfigMap/tandem-options", "metadata.name", "renamed", "there is no ConfigMap tandem-options"),
    (
        "cpu", "ConfigMap/tandem-options", "data.TANDEM_DRAFT_DRAIN_TIMEOUT_SECONDS", "60",
        "Deployment/draft: container draft: terminationGracePeriodSeconds is 45",
    ),
    (
        "cpu", "Deployment/coordinator", f"{CONTAINER}.lifecycle.preStop.sleep.seconds", 20,
        "it must be more than the 20 s before SIGTERM and the 30 s",
    ),
    ("cpu", "Deployment/draft", f"{CONTAINER}.readinessProbe.grpc.port", 50054, "asks at port 50054"),
    ("cpu", "Deployment/draft", f"{POD}.volumes.1.emptyDir", {"medium": "Memory"}, "volume tmp has no sizeLimit"),
    ("cpu", "Deployment/draft", f"{POD}.volumes.1.emptyDir.sizeLimit", "2Gi", "may take all of its memory"),
    ("cpu", "Deployment/draft", f"{POD}.initContainers.0.securityContext", GONE, "container models: readOnly"),
    ("cpu", "Deployment/draft", f"{POD}.initContainers.0.resources", GONE, "container models: cpu has no limit"),
    (
        "cpu", "Deployment/coordinator", f"{CONTAINER}.env.0.value", "targets:50052",
        "there is no headless Service targets",
    ),
    (
        "cpu", "Deployment/coordinator", f"{CONTAINER}.env.0.name", "TANDEM_COORDINATOR_DRAFT_ADDRESS",
        "TANDEM_COORDINATOR_DRAFT_ADDRESS is set twice",
    ),
    ("gpu", "Deployment/draft", f"{CONTAINER}.readinessProbe.exec.command.4", "127.0.0.1:1", "asks at port 1"),
    ("gpu", "PersistentVolumeClaim/models", "metadata.name", "model", "there is no PersistentVolumeClaim models"),
    ("gpu", "PersistentVolumeClaim/models", "spec.accessMode", "ROX", "'accessMode' was unexpected"),
    ("gpu", "Certificate/draft", "spec.secretName", "other", "nothing makes a Secret draft-tls"),
    ("gpu", "Certificate/draft", "spec.dnsNames", ["localhost"], "no certificate is for draft"),
    ("gpu", "Certificate/draft", "spec.issuerRef.name", "nobody", "there is no Issuer nobody"),
    ("gpu", "Certificate/draft", "spec.dnsName", "draft", "'dnsName' was unexpected"),
    ("gpu", "Certificate/draft", "spec.duration", "90d", "does not match"),
    ("gpu", "Issuer/tandem", "spec.ca.secretName", "other", "nothing makes a Secret other"),
    ("gpu", "HorizontalPodAutoscaler/draft", "spec.scaleTargetRef.name", "drafts", "there is no Deployment drafts"),
    ("gpu", "HorizontalPodAutoscaler/draft", "spec.minReplicas", 9, "minReplicas is 9, above maxReplicas 4"),
    ("gpu", "HorizontalPodAutoscaler/draft", "spec.metric", [], "'metric' was unexpected"),
    ("gpu", "Deployment/draft", "spec.replicas", 3, "draft sets replicas"),
    ("gpu", "ServiceMonitor/tandem", "spec.endpoints.0.port", "metric", "no Service that it means has a port"),
    ("gpu", "ServiceMonitor/tandem", "spec.selector.matchLabels", {"app": "x"}, "no Service that it means has a"),
    ("gpu", "PrometheusRule/tandem", "spec.groups.0.rules.0.expression", "x", "'expression' was unexpected"),
    ("gpu", "NetworkPolicy/metrics", "spec.ingress.0.ports.0.port", 9090, "has the port 9090"),
    ("gpu", "Namespace/tandem", "spec", {"finalizer": []}, "'finalizer' was unexpected"),
    ("vllm", "Deployment/vllm", f"{CONTAINER}.readinessProbe.httpGet.port", "web", "asks at port web"),
    ("vllm", "Deployment/vllm", f"{CONTAINER}.env.4.valueFrom.secretKeyRef.name", "key", "nothing makes a Secret key"),
    ("vllm", "Deployment/vllm", f"{POD}.terminationGracePeriodSeconds", 60, "the 60 s before SIGTERM"),
    ("vllm", "ServiceMonitor/vllm", "spec.endpoints.0.port", "web", "no Service that it means has a port web"),
]  # fmt: skip
"""An overlay, one of its objects, a field, its wrong value, and the words that say so."""


@pytest.mark.parametrize(("path", "value", "sentence"), IN_EVERY_WORKLOAD)
def test_a_fault_of_any_workload_is_found(path: str, value: object, sentence: str) -> None:
    for overlay, name in WORKLOADS:
        objects = rendered(overlay)
        changed(named(objects, "Deployment", name), path, value)
        found = [fault for fault in faults(objects) if fault.startswith(f"Deployment/{name}: ")]
        assert any(sentence in fault for fault in found), (overlay, name, found)


@pytest.mark.parametrize(("overlay", "identity", "path", "value", "sentence"), IN_ONE)
def test_a_fault_of_one_object_is_found(
    overlay: str, identity: str, path: str, value: object, sentence: str
) -> None:
    objects = rendered(overlay)
    changed(named(objects, *identity.split("/")), path, value)
    found = faults(objects)
    assert any(sentence in fault for fault in found), found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_kind_of_object_is_passed_over(overlay: str) -> None:
    """A field that no schema knows is a fault wherever it is."""
    for number in range(len(rendered(overlay))):
        objects = rendered(overlay)
        objects[number]["surplus"] = True
        (fault,) = faults(objects)
        assert "'surplus' was unexpected" in fault


@pytest.mark.parametrize(
    "kind", ["Service", "PodDisruptionBudget", "ConfigMap", "PersistentVolumeClaim", "Issuer", "Certificate"]
)
def test_no_object_can_be_left_out(kind: str) -> None:
    """Each is needed by another, apart from Services for callers from outside, and the dashboard."""
    for_others = {"coordinator", "coordinator-replicas", "tandem-dashboard"}
    for number, entry in enumerate(rendered("gpu")):
        if entry["kind"] == kind and (kind != "Service" or entry["metadata"]["name"] not in for_others):
            objects = rendered("gpu")
            del objects[number]
            assert faults(objects) or entry["metadata"]["name"] in for_others, entry["metadata"]["name"]


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("2Gi", 2.0 * 2**30), (1, 1.0), ("1.5", 1.5), ("10M", 1e7)]
)
def test_quantities(text: object, value: float) -> None:
    assert quantity(text) == value


def test_nonsense_is_no_quantity() -> None:
    with pytest.raises(ValueError, match="2Gb is no quantity"):
        quantity("2Gb")

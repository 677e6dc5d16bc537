"""All checks of manifests that are applied together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.manifests.merge import Object
from deploy.manifests.pods import pod_faults
from deploy.manifests.references import workload_faults
from deploy.manifests.schemas import schema_faults
from deploy.manifests.selectors import selector_faults
from deploy.manifests.workloads import Manifests


def faults(objects: Sequence[Object]) -> list[str]:
    """A sentence for each fault; none where all is well.

    What a schema refuses is all that is said: the other checks take for granted what a schema promises.
    """
    broken = [
        f"{_name(entry)}: {fault}"
        for entry in objects
        for fault in (*schema_faults(entry), *_place_faults(entry))
    ]
    return broken or list(_meaning_faults(Manifests(objects)))


def _place_faults(entry: Object) -> Iterator[str]:
    if entry.get("kind") != "Namespace" and "namespace" not in entry.get("metadata", {}):
        yield "it has no namespace, so it would go to whichever is the current one"


def _meaning_faults(manifests: Manifests) -> Iterator[str]:
    for entry in manifests.objects:
        for fault in selector_faults(manifests, entry):
            yield f"{_name(entry)}: {fault}"
    for workload in manifests.workloads:
        options = manifests.options(workload)
        for fault in (*pod_faults(workload.pod, options), *workload_faults(manifests, workload)):
            yield f"Deployment/{workload.name}: {fault}"


def _name(entry: Object) -> str:
    return f"{entry.get('kind')}/{entry.get('metadata', {}).get('name')}"

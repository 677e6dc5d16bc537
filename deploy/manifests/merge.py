"""Patches of Kubernetes objects: strategic merge patches and JSON patches (RFC 6902), as far as the manifests use them.

https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/ describes the former.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeAlias

Object: TypeAlias = dict[str, Any]
"""An object of Kubernetes as its YAML has it."""

_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
}
"""Lists whose entries are merged by a key (`x-kubernetes-patch-merge-key` of the API). All others are replaced."""


class ManifestError(Exception):
    """A manifest or a kustomization cannot be read."""


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """Apply a strategic merge patch. Null deletes a field; new entries of a list come first, as kustomize has them."""
    if isinstance(patch, dict):
        if not isinstance(base, dict):
            base = {}
        result = {key: value for key, value in base.items() if not (key in patch and patch[key] is None)}
        changed = {key: value for key, value in patch.items() if value is not None}
        return result | {key: merged(result.get(key), value, key) for key, value in changed.items()}
    if isinstance(patch, list) and field in _MERGE_KEYS:
        return _merged_entries(base or [], patch, _MERGE_KEYS[field])
    return deepcopy(patch)


def _merged_entries(base: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    """Merge two lists of mappings by the key that their entries have."""

    def identity(entry: Object) -> Any:
        return next((entry[key] for key in keys if key in entry), None)

    known = {identity(entry) for entry in base}
    changes = {identity(entry): entry for entry in patch}
    new = [merged({}, entry) for entry in patch if identity(entry) not in known]
    old = [merged(entry, changes.get(identity(entry), {})) for entry in base]
    return new + old


def json_patched(base: Object, operations: list[Object]) -> Object:
    """Apply a JSON patch of removals and replacements.

    Raises:
        ManifestError: an operation is of another kind, or its path leads nowhere.
    """
    result = deepcopy(base)
    for operation in operations:
        *path, last = operation["path"].lstrip("/").split("/")
        place = result
        try:
            for part in path:
                place = place[part]
            if operation["op"] == "replace":
                place[last] = operation["value"]
            elif operation["op"] == "remove":
                del place[last]
            else:
                raise ManifestError(
                    f"operation {operation['op']} is not known here; it must be remove or replace"
                )
        except KeyError as error:
            raise ManifestError(f"path {operation['path']} leads nowhere: there is no {error}") from error
    return result

"""`kustomize build`, for the fields that deploy/kubernetes uses; any other field is an error.

The tests compare it with `kubectl kustomize` wherever that is installed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.manifests.merge import ManifestError, Object, json_patched, merged

_FIELDS = frozenset(
    ("apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "images", "patches")
)
_GENERATED = "generated"
"""A key of ConfigMaps whose names still lack the hash of their content."""


def render(folder: Path) -> list[Object]:
    """All objects of a kustomization.

    Raises:
        ManifestError: a file is missing or wrong, or a field is not known here.
    """
    objects = _built(folder.resolve(), [])
    names = {}
    for entry in objects:
        if entry.pop(_GENERATED, False):
            name = entry["metadata"]["name"]
            names[name] = entry["metadata"]["name"] = f"{name}-{_content_hash(entry)}"
    for entry in objects:
        _rename_references(entry, names)
    return objects


def documents(text: str, name: str) -> list[Any]:
    """The YAML documents of a text.

    Raises:
        ManifestError: it is no YAML.
    """
    try:
        return [each for each in yaml.safe_load_all(text) if each is not None]
    except yaml.YAMLError as error:
        raise ManifestError(f"{name} cannot be read: {error}") from error


def _read(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror}") from error
    return documents(text, str(path))


def _built(folder: Path, objects: list[Object]) -> list[Object]:
    """The objects given, those that a kustomization adds, and what it makes of both."""
    (config,) = _read(folder / "kustomization.yaml")
    if unknown := config.keys() - _FIELDS:
        raise ManifestError(
            f"{folder / 'kustomization.yaml'}: {', '.join(sorted(unknown))} is not known here"
        )
    for name in config.get("resources", []):
        place = (folder / name).resolve()
        objects = [*objects, *(_built(place, []) if place.is_dir() else _read(place))]
    for name in config.get("components", []):
        objects = _built((folder / name).resolve(), objects)
    objects = [*objects, *(_config_map(folder, entry) for entry in config.get("configMapGenerator", []))]
    for patch in config.get("patches", []):
        objects = list(_patched(objects, _read(folder / patch["path"]), patch.get("target")))
    for entry in objects:
        _set_images(entry, config.get("images", []))
        _set_namespace(entry, config.get("namespace"))
    _check_unique(objects)
    return objects


def _config_map(folder: Path, entry: Object) -> Object:
    options = entry.get("options", {})
    literals = dict(text.split("=", 1) for text in entry.get("literals", []))
    files = {name: (folder / name).read_text(encoding="utf-8") for name in entry.get("files", [])}
    labels = {"labels": options["labels"]} if "labels" in options else {}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": entry["name"], **labels},
        "data": literals | files,
        _GENERATED: not options.get("disableNameSuffixHash", False),
    }


def _patched(objects: list[Object], patch: list[Any], target: Object | None) -> Iterator[Object]:
    """Apply a file of one patch to the objects that its target names, or that have its own kind and name."""
    (change,) = patch
    if target is None:
        target = {"kind": change["kind"], "name": re.escape(change["metadata"]["name"])}
        if not any(_is_meant(entry, target) for entry in objects):
            raise ManifestError(f"there is no {target['kind']} {target['name']} to patch")
    for entry in objects:
        if not _is_meant(entry, target):
            yield entry
        elif isinstance(change, list):
            yield json_patched(entry, change)
        elif change.get("$patch") != "delete":
            yield merged(entry, change) | {
                "metadata": merged(
                    entry["metadata"], change["metadata"] | {"name": entry["metadata"]["name"]}
                )
            }


def _is_meant(entry: Object, target: Object) -> bool:
    return entry["kind"] == target["kind"] and bool(re.fullmatch(target["name"], entry["metadata"]["name"]))


def _set_images(entry: Object, images: list[Object]) -> None:
    pod = entry.get("spec", {}).get("template", {}).get("spec", {})
    for container in [*pod.get("containers", []), *pod.get("initContainers", [])]:
        name, _, tag = container["image"].rpartition(":")
        for image in images:
            if image["name"] == name:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"


def _set_namespace(entry: Object, namespace: str | None) -> None:
    if namespace is not None:
        field = "name" if entry["kind"] == "Namespace" else "namespace"
        entry["metadata"][field] = namespace


def _check_unique(objects: list[Object]) -> None:
    seen: set[tuple[str, str]] = set()
    for entry in objects:
        identity = (entry["kind"], entry["metadata"]["name"])
        if identity in seen:
            raise ManifestError(f"there are two objects {'/'.join(identity)}")
        seen.add(identity)


def _content_hash(config_map: Object) -> str:
    """Kustomize's suffix: ten digits of a SHA-256 in letters that make no words. It leaves the name out."""
    content = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    text = json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for letter in "<>&":  # as Go writes JSON
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(str.maketrans("013ae", "ghkmt"))


def _rename_references(value: Any, names: dict[str, str]) -> None:
    if isinstance(value, list):
        for entry in value:
            _rename_references(entry, names)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key in ("configMapRef", "configMapKeyRef", "configMap") and entry["name"] in names:
                entry["name"] = names[entry["name"]]
            else:
                _rename_references(entry, names)

"""Schemas: Kubernetes' own from the package kubernetes-validate, and those of the custom resources that we use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import jsonschema
from referencing import Registry, Resource

from deploy.manifests.merge import Object

KUBERNETES = "1.37"
"""The release whose schemas the manifests are checked against."""

_FOLDER = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> Object:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_RULE = _closed(
    ("alert", "expr"), alert=_TEXT, expr=_TEXT, labels=_LABELS, annotations=_LABELS, **{"for": _DURATION}
)
_SPECS: dict[tuple[str, str], Object] = {
    # https://cert-manager.io/docs/reference/api-docs/#cert-manager.io/v1
    ("cert-manager.io/v1", "Issuer"): _closed(
        selfSigned=_closed(), ca=_closed(("secretName",), secretName=_TEXT)
    )
    | {"minProperties": 1, "maxProperties": 1},
    ("cert-manager.io/v1", "Certificate"): _closed(
        ("secretName", "issuerRef"),
        secretName=_TEXT,
        isCA={"type": "boolean"},
        commonName=_TEXT,
        dnsNames=_TEXTS,
        duration=_DURATION,
        renewBefore=_DURATION,
        usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
        privateKey=_closed(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size={"enum": [256, 384, 521]},
            rotationPolicy={"enum": ["Never", "Always"]},
        ),
        issuerRef=_closed(("name",), group=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, name=_TEXT),
    ),
    # https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PrometheusRule
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ("groups",),
        groups={
            "type": "array",
            "items": _closed(("name", "rules"), name=_TEXT, rules={"type": "array", "items": _RULE}),
        },
    ),
    # https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.ServiceMonitor
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _closed(
        ("selector", "endpoints"),
        jobLabel=_TEXT,
        selector=_closed(matchLabels=_LABELS),
        endpoints={
            "type": "array",
            "minItems": 1,
            "items": _closed(("port",), port=_TEXT, interval=_DURATION, path=_TEXT),
        },
    ),
}
"""The specs of custom resources, with the fields that we use and no other: a misspelt one is a fault."""


def schema_faults(entry: Object) -> Iterator[str]:
    """The places where an object breaks its schema: what it has too much, and what it lacks."""
    validator = _validator(str(entry.get("apiVersion")), str(entry.get("kind")))
    if validator is None:
        yield f"{entry.get('kind')} of {entry.get('apiVersion')} is no kind of Kubernetes {KUBERNETES}"
        return
    for error in validator.iter_errors(entry):
        yield f"{error.json_path}: {error.message}"


@cache
def _validator(api_version: str, kind: str) -> Any:
    """The validator of a kind; None for an unknown one."""
    if (api_version, kind) in _SPECS:
        metadata = _closed(("name",), name=_TEXT, namespace=_TEXT, labels=_LABELS)
        whole = _closed(
            ("metadata", "spec"), apiVersion={}, kind={}, metadata=metadata, spec=_SPECS[api_version, kind]
        )
        return jsonschema.Draft202012Validator(whole)
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _content(f"{kind.lower()}-{group}.json")
    return None if schema is None else jsonschema.Draft202012Validator(schema, registry=_definitions())


@cache
def _definitions() -> Registry[Any]:
    empty: Registry[Any] = Registry()
    return Resource.from_contents(_content("_definitions.json")) @ empty


def _content(name: str) -> Any:
    file = resources.files("kubernetes_validate").joinpath(_FOLDER, name)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

"""Each field that a client of vLLM may send is served here, or refused by name; docs/http.md says which."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from tandem_coordinator.http.app import ENDPOINTS
from tandem_coordinator.http.schema import Body
from tests.paths import ROOT

PEERS: dict[str, Any] = tomllib.loads((ROOT / "docs" / "peer-fields.toml").read_text(encoding="utf-8"))
BODIES: dict[str, type[Body]] = {path: body for _, path, _, _, body in ENDPOINTS if body is not None}


@pytest.mark.parametrize("path", PEERS["vllm"]["fields"])
def test_each_field_of_vllms_requests_is_served_or_refused_by_name(path: str) -> None:
    """One that `Body` only passes over would change nothing, and its client would have to read a header to know."""
    known = BODIES[path].model_fields
    assert [name for name in PEERS["vllm"]["fields"][path] if name not in known] == []
    assert all(known[name].description for name in PEERS["vllm"]["fields"][path])


def test_the_lists_name_every_endpoint_that_both_have() -> None:
    assert PEERS["vllm"]["fields"].keys() == BODIES.keys()


def test_the_tests_that_the_table_names_are_about_the_field() -> None:
    for file, fields in PEERS["tests"].items():
        content = (ROOT / file).read_text(encoding="utf-8")
        assert [name for name in fields if name not in content] == [], file

"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import grpc.aio

from tandem.model.admin import Severity
from tandem_coordinator.transport.conformance.draft import SUITE
from tests.paths import ROOT

SECONDS = 30.0


def example(name: str) -> ModuleType:
    """The module of an example. Its dataclasses look it up among the loaded ones."""
    own_name = f"example_{name.replace('/', '_')}"
    spec = importlib.util.spec_from_file_location(own_name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module
    spec.loader.exec_module(module)
    return module


async def test_the_draft_of_a_page_conforms() -> None:
    server, port = await example("lookup_draft").serve(0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            findings = await SUITE.check(channel, SECONDS)
    finally:
        await server.stop(None)
    assert [each.check for each in findings] == list(SUITE.checks)
    assert [f"{each.check}: {each.detail}" for each in findings if each.severity is not Severity.OK] == []

"""Named coordinators are kept in a file; options, environment and context take effect in a fixed order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.cli.connection import Contexts, merged, read_contexts
from tandem.errors import ConfigurationError
from tests.commands import Commands

CONTEXTS = Contexts(Path("file"), "here", {"here": {"address": "a:1"}, "there": {"address": "b:2"}})


def test_contexts_are_created_used_and_deleted(commands: Commands, tmp_path: Path) -> None:
    assert commands.succeed("context", "list", "-o", "json") == "[]\n"
    commands.succeed("context", "set", "here", "--address", "127.0.0.1:1")
    commands.succeed("context", "set", "there", "--address", "there:2", "--tls-ca-file", "ca.pem")
    listed = json.loads(commands.succeed("context", "list", "-o", "json"))
    assert [(entry["name"], entry["current"], entry["address"]) for entry in listed] == [
        ("here", True, "127.0.0.1:1"),
        ("there", False, "there:2"),
    ]
    assert Path(listed[1]["tls_ca_file"]).is_absolute(), "later commands may run elsewhere"
    commands.succeed("context", "use", "there")
    assert read_contexts().current == "there"
    commands.succeed("context", "set", "there", "--token", "a-secret-of-mine")
    assert read_contexts().get("there")["address"] == "there:2"
    assert "a-secret" not in commands.succeed("context", "list")
    assert (tmp_path / "config" / "tandem" / "config.yaml").stat().st_mode & 0o777 == 0o600
    commands.succeed("context", "delete", "there")
    assert read_contexts() == Contexts(read_contexts().path, "", {"here": {"address": "127.0.0.1:1"}})


def test_an_unknown_context_is_refused(commands: Commands) -> None:
    commands.succeed("context", "set", "here", "--address", "127.0.0.1:1")
    for words in (("context", "use", "x"), ("context", "delete", "x"), ("admin", "status", "--context", "x")):
        assert "there is no context 'x'; " in commands.fail(2, *words)
    assert "nothing was given" in commands.fail(2, "context", "set", "new")


def test_values_of_the_environment_are_not_kept(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CLIENT_TOKEN", "a-secret-of-mine")
    commands.succeed("context", "set", "here", "--address", "127.0.0.1:1")
    assert read_contexts().get("here") == {"address": "127.0.0.1:1"}


@pytest.mark.parametrize("content", ["[1, 2]", "contexts: [a]", "contexts: {a: 1}", "a: [", "\t"])
def test_an_invalid_context_file_is_refused(commands: Commands, tmp_path: Path, content: str) -> None:
    path = tmp_path / "config" / "tandem" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    assert str(path) in commands.fail(2, "context", "list")


def test_options_override_the_environment_which_overrides_the_context() -> None:
    assert merged({}, set(), CONTEXTS) == {"address": "a:1"}
    assert merged({"address": "env:1"}, set(), CONTEXTS)["address"] == "env:1"
    named = {"address": "env:1", "context": "there"}
    assert merged(named, {"context"}, CONTEXTS)["address"] == "b:2"
    assert merged(named, set(), CONTEXTS)["address"] == "env:1"
    assert merged({"address": "line:1", "context": "there"}, {"address", "context"}, CONTEXTS)["address"] == (
        "line:1"
    )
    with pytest.raises(ConfigurationError, match="there is no context 'x'; file has: here, there"):
        merged({"context": "x"}, {"context"}, CONTEXTS)


def test_commands_go_to_the_current_context(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.succeed("context", "set", "here", "--address", "127.0.0.1:1")
    assert "coordinator 127.0.0.1:1: " in commands.fail(4, "admin", "status")
    assert "coordinator 127.0.0.1:1: " in commands.fail(4, "generate", "prompt")
    monkeypatch.setenv("TANDEM_CLIENT_ADDRESS", "127.0.0.1:2")
    assert "coordinator 127.0.0.1:2: " in commands.fail(4, "admin", "status")
    assert "coordinator 127.0.0.1:1: " in commands.fail(4, "admin", "status", "--context", "here")

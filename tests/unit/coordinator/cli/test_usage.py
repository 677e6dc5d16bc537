"""How commands are called, and their errors for wrong calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import SHORT_FORMS, VERBS, app
from tandem import __version__
from tests.commands import Commands


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "no such command 'nonsense'"),
        (("admin", "statsu"), "did you mean"),
        (("admin", "status", "--adress", "x"), "no such option: --adress"),
        (("admin", "status", "more"), "unexpected extra argument"),
        (("admin", "status", "-o", "xml"), "'xml' is not one of 'table', 'json', 'yaml'"),
        (("admin", "replicas", "show"), "missing argument 'ADDRESS'"),
        (("admin", "stats", "--watch", "--count", "0"), "--count"),
        (("generate", "x", "--top-k", "many"), "--top-k"),
        (("generate", "x", "--no-such-option"), "--no-such-option"),
        (("up", "--threads", "x"), "--threads"),
        (("admin", "status", "--address", "nowhere"), "address is 'nowhere'; it must be host:port"),
        (
            ("generate", "x", "--address", "https://host:50051/"),
            "address is 'https://host:50051/'; it must be host:port without https://, for instance 'host:50051', and "
            "--tls where the coordinator has a certificate",
        ),
        (("admin", "status", "--address", "http://127.0.0.1:8000"), "without http://, for instance '127.0.0.1:8000'"),
        (("generate", "x", "-n", "0"), "-n"),
        (("serve", "draft"), "--method ngram and --method suffix need none"),
        (("serve", "target"), "--model is missing"),
        (("serve", "target", "--model", "x", "--tensor-parallel-size", "2"),
            "tensor_parallel_size is 2, which the engine tandem does not have"),
        (("serve", "target", "--model", "x", "--device", "tpu"), "device is 'tpu'"),
        (("serve", "target", "--model", "x", "--dtype", "int8"), "dtype is int8; it must be"),
        (("admin", "status", "--timeout", "0"), "--timeout is 0; it must be above 0"),
        (("admin", "status", "--tls-cert-file", "x.pem"), "without its key"),
        (("admin", "status", "--tls-ca-file", "no/such/file"), "no/such/file"),
        (("admin", "config", "set", "relaxed_topk"), "relaxed_topk has no value"),
    ],
)  # fmt: skip
def test_a_wrong_call_has_one_sentence(commands: Commands, words: tuple[str, ...], sentence: str) -> None:
    assert sentence.lower() in commands.fail(2, *words).lower()


def test_logs_says_where_the_logs_are(commands: Commands) -> None:
    assert "each service writes its log to standard error" in commands.fail(2, "logs", "-f")


def test_a_service_can_be_set_up_by_variables(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TARGET_MODEL", "no/such/folder")
    assert "no/such/folder" in commands.run("serve", "target").err


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (("replicas",), "replicas"),
        (("replicas", "-o", "json"), "replicas"),
        (("requests",), "requests"),
        (("replicas", "drain", "127.0.0.1:2"), None),
    ],
)
def test_a_short_form_lists_what_there_is_unless_more_is_said(
    commands: Commands, words: tuple[str, ...], listed: str | None
) -> None:
    address = ("--address", "127.0.0.1:1")
    ran = commands.run(*words, *address)
    long = ("admin", listed, "list", *words[1:]) if listed else ("admin", *words)
    assert (ran.code, ran.err) == (4, commands.run(*long, *address).err)


def test_a_group_alone_shows_its_help(commands: Commands) -> None:
    for words in ((), ("admin",), ("context",)):
        ran = commands.run(*words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("Usage: ")
        assert "Commands:" in ran.err


def test_version_prints_the_version(commands: Commands) -> None:
    assert commands.succeed("--version") == f"tandem {__version__}\n"


@pytest.mark.parametrize(
    "words", ["", "up", "generate", "serve", "config", "config check", "admin", "admin stats", "context set"]
)
def test_help_has_a_short_name(commands: Commands, words: str) -> None:
    assert commands.succeed(*words.split(), "-h") == commands.succeed(*words.split(), "--help")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_verbs(shell: str) -> None:
    environment = {
        "_TANDEM_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "tandem admin re",
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": "tandem admin re",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="tandem")
    assert "replicas" in result.stdout
    assert "requests" in result.stdout
    assert "status" not in result.stdout


@pytest.mark.parametrize("verb", [*VERBS, *SHORT_FORMS])
def test_every_verb_has_its_help(verb: str) -> None:
    shown = CliRunner().invoke(app, [verb, "--help"])
    assert shown.exit_code == 0
    assert shown.output.lower().startswith("usage: ")


def test_the_help_of_the_program_imports_no_verb() -> None:
    code = (
        "import sys; from coordinator.cli.main import app; app(['--help'], standalone_mode=False)\n"
        "assert not {'pydantic', 'numpy', 'coordinator.cli.command'} & sys.modules.keys()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n  {verb} " in shown.stdout for verb in VERBS)

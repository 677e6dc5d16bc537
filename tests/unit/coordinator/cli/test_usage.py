"""How commands are called, their errors for wrong calls, and the coordinators that are kept by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem import __version__
from tandem_coordinator.cli import audit
from tandem_coordinator.cli.connection import Connection, Contexts, read_contexts
from tandem_coordinator.cli.main import VERBS, app, checkout_commit
from tests.commands import Commands
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "no such command 'nonsense'"),
        (("statsu",), "no such command 'statsu'. Did you mean 'admin status', 'admin stats'?"),
        (("generat", "x"), "no such command 'generat'. Did you mean 'generate'?"),
        (("replicas",), "no such command 'replicas'. Did you mean 'admin replicas'?"),
        (("replicas", "drain", "127.0.0.1:2"), "did you mean 'admin replicas'?"),
        (("doctor",), "no such command 'doctor'. Did you mean 'doctor draft', 'doctor target', 'admin doctor'?"),
        (("serve", "coordinater"), "there is no service 'coordinater'; did you mean coordinator?"),
        (("logs", "-f"), "each service writes its log to standard error"),
        (("admin", "statsu"), "did you mean"),
        (("admin", "status", "--adress", "x"), "--adress is not an option; did you mean --address?"),
        (("admin", "status", "--outptu", "json"), "--outptu is not an option; did you mean --output?"),
        (("admin", "status", "--addr=x:1"), "--addr is not an option; did you mean --address?"),
        (("admin", "replicas", "show", "--jsno"), "--jsno is not an option; did you mean --json?"),
        (("admin", "status", "-z"), "no such option: -z"),
        (("admin", "status", "more"), "unexpected extra argument"),
        (("admin", "status", "-o", "xml"), "--output is xml; it must be 'table', 'json' or 'yaml'"),
        (("admin", "replicas", "show"), "missing argument 'ADDRESS'"),
        (("admin", "stats", "--watch", "--count", "0"), "--count is 0; it must be at least 1"),
        (("generate", "x", "--top-k", "many"), "--top-k is 'many'; it must be an integer"),
        (("generate", "x", "--no-such-option"), "--no-such-option is not an option"),
        (("generate", "x", "--top-k"), "option '--top-k' requires an argument"),
        (("generate", "x", "--logit-bias", "5:1", "--logit-bias", "5"),
            "--logit-bias is '5'; it must be ID:BIAS, such as 5:-1.5"),
        (("generate", "x", "--stop-token-id", "x"), "--stop-token-id is 'x'; it must be an integer"),
        (("generate", "x", "--row-kind", "rows"), "--row-kind is rows; it must be 'token', 'support' or 'dense'"),
        (("generate", "--prompt-token-ids", "1,x"), "--prompt-token-ids is '1,x'; it must be integers: 1,2,3"),
        (("generate", "--prompt-file", "x", "y"), "2 prompts were given; give exactly one of PROMPT, --prompt-file"),
        (("generate", "--prompt-token-ids", "1", "--chat"), "--prompt-token-ids and --chat are both given"),
        (("generate", "x", "--system", "y"), "--system is given and --chat is not"),
        (("plan", "--verify-ms", "5"), "--verify-ms was given without --draft-step-ms and --acceptance"),
        (("plan", "--verify-ms", "nan"), "--verify-ms is nan; it must be"),
        (("plan", "--target", "demo", "--device", "abacus"), "--device is 'abacus'; it must be cpu, cuda, cuda:N"),
        (("plan", "--batch", "0"), "--batch is '0'; it must be numbers from 1 to 4096"),
        (("plan", "--acceptance", "2"), "--acceptance is '2'; it must be rates between 0 and 1"),
        (("context", "set", "here", "--address", "nowhere"), "--address is 'nowhere'; it must be host:port"),
        (("up", "--threads", "x"), "--threads is 'x'; it must be an integer"),
        (("up", "--log-level", "loud"), "--log-level is loud; it must be 'debug', 'info', 'warning' or 'error'"),
        (("admin", "status", "--address", "nowhere"), "address is 'nowhere'; it must be host:port"),
        (
            ("generate", "x", "--address", "https://host:50051/"),
            "address is 'https://host:50051/'; it must be host:port without https://, for instance 'host:50051', and "
            "--tls where the coordinator has a certificate",
        ),
        (("admin", "status", "--address", "http://127.0.0.1:8000"), "without http://, for instance '127.0.0.1:8000'"),
        (("generate", "x", "-n", "0"), "-n is 0; it must be at least 1"),
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


def test_faults_of_all_groups_of_a_verb_are_told_in_one_answer(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CLIENT_TIMEOUT", "soon")
    words = (
        "generate",
        "x",
        "--temprature",
        "1",
        "--top-k",
        "many",
        "-n",
        "0",
        "--address",
        "nowhere",
        "--chta",
    )
    assert commands.fail(2, *words).split("; ") == [
        "--temprature is not an option",
        "did you mean --temperature?",
        "--chta is not an option",
        "did you mean --chat?",
        "--top-k is 'many'",
        "it must be an integer",
        "-n is 0",
        "it must be at least 1",
        "--address is 'nowhere'",
        "it must be host:port, for instance 127.0.0.1:50051",
        "TANDEM_CLIENT_TIMEOUT is 'soon'",
        "it must be a number",
    ]


def test_an_option_is_read_from_the_environment_where_its_help_says_so(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = " ".join(commands.succeed("context", "list", "--help").split())
    assert "[env var: TANDEM_CLIENT_OUTPUT; default: table]" in shown
    assert shown.count("TANDEM_") == 1
    monkeypatch.setenv("TANDEM_CLIENT_AS_JSON", "true")
    assert "NAME" in commands.succeed("context", "list")
    monkeypatch.setenv("TANDEM_CLIENT_OUTPUT", "json")
    assert commands.succeed("context", "list") == "[]\n"
    assert commands.succeed("context", "list", "-o", "yaml") == "[]\n"
    monkeypatch.setenv("TANDEM_CLIENT_OUTPUT", "xml")
    sentence = "is xml; it must be 'table', 'json' or 'yaml'"
    assert commands.fail(2, "context", "list") == f"TANDEM_CLIENT_OUTPUT {sentence}"
    assert commands.fail(2, "context", "list", "-o", "toml") == f"--output {sentence.replace('xml', 'toml')}"
    monkeypatch.setenv("TANDEM_CLIENT_OUTPUT", "")
    assert "NAME" in commands.succeed("context", "list")


def test_a_token_of_the_command_line_is_stronger_than_a_file_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_CLIENT_TOKEN_FILE", str(tmp_path / "token"))
    assert Connection().token_file == tmp_path / "token"
    assert Connection(token="of the command line").token_file is None


def test_a_group_alone_shows_its_help(commands: Commands) -> None:
    for words in ((), ("admin",), ("context",)):
        ran = commands.run(*words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("Usage: ")
        assert "Commands:" in ran.err


def test_version_prints_the_version_and_the_commit_of_a_checkout(commands: Commands) -> None:
    commit = checkout_commit(ROOT)
    origin = f" (commit {commit})" if commit else ""
    assert commands.succeed("--version") == f"tandem {__version__}{origin}\n"


def test_the_commit_is_that_of_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ("git", "-C", str(tmp_path), *identity, *words)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert checkout_commit(tmp_path) is None
    git("init")
    assert checkout_commit(tmp_path) is None, "nothing is committed yet"
    git("commit", "--allow-empty", "--message", "first")
    commit = checkout_commit(tmp_path)
    assert commit
    assert git("rev-parse", "HEAD").startswith(commit)
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    assert checkout_commit(installed) is None, "an environment inside somebody's checkout is none of Tandem's"
    monkeypatch.setenv("PATH", "")
    assert checkout_commit(tmp_path) is None, "git is missing"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_verbs(shell: str) -> None:
    shown = completed(shell, "tandem admin re")
    assert "replicas" in shown
    assert "requests" in shown
    assert "status" not in shown


def test_the_shell_completes_an_options_values() -> None:
    assert completed("bash", "tandem context list --output ").split() == ["table", "json", "yaml"]
    assert completed("bash", "tandem generate --row-kind s").split() == ["support"]


def completed(shell: str, words: str) -> str:
    environment = {
        "_TANDEM_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    return CliRunner().invoke(app, [], env=environment, prog_name="tandem").stdout


@pytest.mark.parametrize("words", ["", *VERBS, "config check", "admin stats", "context set"])
def test_every_verb_has_its_help_which_has_a_short_name(commands: Commands, words: str) -> None:
    shown = commands.succeed(*words.split(), "--help")
    assert shown.lower().startswith("usage: ")
    assert commands.succeed(*words.split(), "-h") == shown


def test_the_help_of_the_program_imports_no_verb() -> None:
    code = (
        "import sys; from tandem_coordinator.cli.main import app; app(['--help'], standalone_mode=False)\n"
        "assert not {'pydantic', 'numpy', 'tandem_coordinator.cli.command'} & sys.modules.keys()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n  {verb} " in shown.stdout for verb in VERBS)


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
        refusal = commands.fail(2, *words)
        assert refusal.startswith("there is no context 'x'; ")
        assert refusal.endswith("config.yaml has: here")
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


def test_options_override_the_environment_which_overrides_the_context(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.succeed("context", "set", "here", "--address", "127.0.0.1:1")
    commands.succeed("context", "set", "there", "--address", "127.0.0.1:2")

    def port(*words: str) -> str:
        sentence = commands.fail(4, *(words or ("admin", "status")))
        return sentence.removeprefix("coordinator 127.0.0.1:").partition(":")[0]

    assert port() == port("generate", "prompt") == "1"
    monkeypatch.setenv("TANDEM_CLIENT_CONTEXT", "there")
    assert port() == "2"
    monkeypatch.setenv("TANDEM_CLIENT_ADDRESS", "127.0.0.1:3")
    assert port() == "3"
    by_name = ("admin", "status", "--context", "here")
    assert port(*by_name) == "1"
    assert port(*by_name, "--address", "127.0.0.1:4") == "4"


class Brought:
    """The verb of another package."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], str]] = []

    def load(self) -> Callable[[list[str], str], int]:
        def run(words: list[str], program: str) -> int:
            self.calls.append((words, program))
            return 3

        return run


def test_an_audit_is_left_to_the_package_that_brings_it(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = Brought()
    monkeypatch.setattr(audit, "entry_points", lambda group, name: [brought])
    assert commands.run("audit", "http://a/v1", "--help", "--minutes", "3").code == 3
    assert brought.calls == [(["http://a/v1", "--help", "--minutes", "3"], "tandem audit")]


def test_an_audit_without_its_package_names_what_to_install(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "entry_points", lambda group, name: [])
    assert commands.fail(2, "audit", "http://a/v1").endswith("install it: pip install tandem-audit")

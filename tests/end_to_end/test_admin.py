"""Every verb of `tandem admin` against real processes, in every output format, and its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tandem.clients.sync_client import SyncClient
from tandem.errors import AbortedError
from tandem_coordinator.cli.main import app
from tests.commands import Commands
from tests.end_to_end.processes import address_of, coordinator, forked, service
from tests.snapshots import assert_matches

PROMPT = "def area(width, height):\n    area = width"


def complete(address: str, max_tokens: int) -> None:
    with SyncClient(address) as client:
        client.complete(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def shape(value: object) -> object:
    """The form of a document: names and words, the kinds of other values, and of a list the entries that differ."""
    if isinstance(value, dict):
        # Whether a rank has hits is a matter of time.
        return {name: shape(each) for name, each in value.items() if name != "hits_by_rank"}
    if isinstance(value, list):
        shapes = [shape(each) for each in value]
        return [each for place, each in enumerate(shapes) if each not in shapes[:place]]
    if isinstance(value, str):
        return value if re.fullmatch("[a-z_-]*", value) else "text"
    return value if value is None or isinstance(value, bool) else "number"


def assert_kept(name: str, out: str) -> None:
    """Compare the form of a document in JSON with the one that is kept."""
    documents = [shape(each) for each in documents_in(out)]
    assert_matches(f"admin/{name}.json.txt", "".join(f"{json.dumps(each, indent=2)}\n" for each in documents))


def documents_in(out: str) -> list[Any]:
    """Parse an output in JSON: one document, or one for each repetition."""
    found = []
    rest = out.strip()
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found


pytestmark = pytest.mark.slow
ADMIN_TOKEN = "an-admin-token-for-tests"
CLIENT_TOKEN = "a-client-token-for-tests"


@pytest.fixture(scope="module")
def draft() -> Iterator[str]:
    """A draft without a model: it loads at once, and the prompt repeats enough for n-gram proposals."""
    arguments = ("--speculative-method", "ngram", "--prompt-lookup-max", "3", "--prompt-lookup-min", "1")
    with service("tandem_draft", *arguments) as process:
        yield address_of(process)


@pytest.fixture(scope="module")
def cluster(target_address: str, draft: str) -> Iterator[str]:
    """A coordinator that has completed a request."""
    # Speculation stays on, however little it gains on a busy machine.
    options = ("--speculation-policy", "fixed", "--draft-patience-seconds", "30")
    with coordinator(target_address, draft, *options) as process:
        address = address_of(process)
        complete(address, 24)
        yield address


@pytest.fixture
def commands(cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    monkeypatch.setenv("TANDEM_CLIENT_ADDRESS", cluster)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return Commands()


VERBS = {
    "status": ("status",),
    "replicas-list": ("replicas", "list"),
    "replicas-show": ("replicas", "show", "TARGET"),
    "stats": ("stats",),
    "stats-watch": ("stats", "--watch", "--interval", "0.1", "--count", "2"),
    "config-show": ("config", "show", "--live"),
    "health": ("health",),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_its_result_in_every_form(
    commands: Commands, target_address: str, verb: str
) -> None:
    words = ["admin", *(target_address if word == "TARGET" else word for word in VERBS[verb])]
    out = commands.succeed(*words, "-o", "json")
    assert_kept(verb, out)
    told = documents_in(out)
    assert len(told) == (2 if verb == "stats-watch" else 1)
    in_yaml = list(yaml.safe_load_all(commands.succeed(*words, "-o", "yaml")))
    assert shape(in_yaml) == shape(told)
    assert commands.succeed(*words).strip()


def test_status_and_replicas_may_be_watched(commands: Commands) -> None:
    for verb in (("status",), ("replicas", "list")):
        out = commands.succeed("admin", *verb, "-w", "--interval", "0.1", "--count", "2", "-o", "json")
        first, second = documents_in(out)
        assert shape(first) == shape(second)


def test_requests_are_listed_shown_and_aborted(commands: Commands, cluster: str) -> None:
    def running() -> str:
        listed: list[Any] = []
        while not listed or not listed[0]["speculation"]["drafted"]:
            listed = json.loads(commands.succeed("admin", "requests", "list", "-o", "json"))
        return str(listed[0]["request_id"])

    outs: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:
        completion = pool.submit(complete, cluster, 900)
        request_id = running()
        outs["requests-list"] = commands.succeed("admin", "requests", "list", "-o", "json")
        outs["requests-show"] = commands.succeed("admin", "requests", "show", request_id[:16], "-o", "json")
        abort = ("admin", "requests", "abort", request_id, "--reason", "making room", "-o", "json")
        outs["requests-abort"] = commands.succeed(*abort)
    with pytest.raises(
        AbortedError, match=r"an administrator ended the request after \d+ tokens: making room$"
    ):
        completion.result()
    assert json.loads(commands.succeed("admin", "requests", "list", "-o", "json")) == []
    assert "begins with" in commands.fail(5, "admin", "requests", "show", request_id)
    for verb, out in outs.items():
        assert_kept(verb, out)


def test_options_are_set_and_reset(commands: Commands) -> None:
    setting = "admin config set num_speculative_tokens 6 rejection-sample-method=strict -o json"
    resetting = "admin config reset num_speculative_tokens rejection_sampling_strategy -o json"
    assert_kept("config-set", commands.succeed(*setting.split()))
    assert_kept("config-reset", commands.succeed(*resetting.split()))


def test_a_replica_is_drained_and_resumed(commands: Commands, draft: str) -> None:
    for verb in ("drain", "resume"):
        assert_kept(f"replicas-{verb}", commands.succeed("admin", "replicas", verb, draft, "-o", "json"))


def test_draining_the_last_target_needs_yes(commands: Commands, target_address: str) -> None:
    refusal = commands.fail(2, "admin", "replicas", "drain", target_address)
    assert refusal == (
        f"{target_address} is the last target that takes new sequences; to drain it all the same, give --yes"
    )
    try:
        commands.succeed("admin", "replicas", "drain", target_address, "--yes")
        unhealthy = commands.run("admin", "health")
        assert (unhealthy.code, unhealthy.err) == (3, "")
        assert unhealthy.out.startswith("unhealthy: unavailable")
        diagnosis = commands.run("admin", "doctor")
        assert (diagnosis.code, diagnosis.err) == (3, "")
        assert "✗  targets" in diagnosis.out
        assert f"tandem admin replicas resume {target_address}" in diagnosis.out
    finally:
        commands.succeed("admin", "replicas", "resume", target_address)
    assert commands.succeed("admin", "health").startswith("healthy: ready")


def test_the_doctor_finds_no_problem(commands: Commands) -> None:
    assert "0 problems" in commands.succeed("admin", "doctor")
    report = json.loads(commands.succeed("admin", "doctor", "-o", "json"))
    assert report["healthy"] is True
    checks = {finding["check"] for finding in report["findings"]}
    expected = "address,TLS,round trip,version,clock,targets,drafts,target,draft,models,rule,load,acceptance,services"
    assert set(expected.split(",")) <= checks
    assert {finding["severity"] for finding in report["findings"]} <= {"ok", "warning"}
    for finding in report["findings"]:
        assert set(finding) == {"check", "subject", "severity", "detail", "advice"}


@pytest.mark.parametrize(("answer", "is_drained"), [("n", False), ("", False), ("y", True)])
def test_draining_the_last_target_asks_a_person(
    commands: Commands, target_address: str, monkeypatch: pytest.MonkeyPatch, answer: str, is_drained: bool
) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(answer + "\n"))
    ran = commands.run("admin", "replicas", "drain", target_address)
    assert "Drain it? [y/N] " in ran.err, "the question is not part of the result"
    assert (ran.code, bool(ran.out)) == ((0, True) if is_drained else (1, False))
    if is_drained:
        commands.succeed("admin", "replicas", "resume", target_address)


def test_unknown_replicas_requests_and_options_are_named(
    commands: Commands, target_address: str, draft: str
) -> None:
    known = f"there are: {target_address}, {draft}"
    for verb in ("show", "drain", "resume"):
        assert known in commands.fail(5, "admin", "replicas", verb, "127.0.0.1:1")
    assert "no request that runs" in commands.fail(5, "admin", "requests", "abort", "abc")
    assert "there is no option nothing" in commands.fail(5, "admin", "config", "show", "nothing")


def test_the_shell_completes_addresses(cluster: str, target_address: str, draft: str) -> None:
    environment = {
        "_TANDEM_COMPLETE": "complete_bash",
        "COMP_WORDS": "tandem admin replicas show 127",
        "COMP_CWORD": "4",
        "TANDEM_CLIENT_ADDRESS": cluster,
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="tandem")
    assert sorted(result.stdout.split()) == sorted([target_address, draft])


def test_an_unreachable_coordinator_is_named(commands: Commands) -> None:
    """Once in a process of its own, to see the exit code and both streams."""
    with forked("tandem", "admin", "status", "--address", "127.0.0.1:1") as process:
        assert (process.wait(), process.stdout) == (4, "")
        (line,) = process.stderr.splitlines()
    assert line.startswith("error: coordinator 127.0.0.1:1: ")
    for words in (
        *(("status",), ("replicas", "list"), ("requests", "list"), ("stats",), ("stats", "--watch")),
        *(("config", "show"), ("config", "set", "relaxed_topk", "3"), ("health",)),
        ("health", "--wait", "--timeout", "0.5"),
    ):
        assert "127.0.0.1:1" in commands.fail(4, "admin", *words, "--address", "127.0.0.1:1")
    diagnosis = commands.run("admin", "doctor", "--address", "127.0.0.1:1")
    assert (diagnosis.code, diagnosis.err) == (4, "")
    assert "Connect call failed" in diagnosis.out or "refused" in diagnosis.out


def test_every_verb_needs_an_admin_token(
    target_address: str, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, token in (("admin", ADMIN_TOKEN), ("client", CLIENT_TOKEN)):
        (tmp_path / name).write_text(token + "\n", encoding="utf-8")
    tokens = ("--admin-token-file", str(tmp_path / "admin"), "--auth-token-file", str(tmp_path / "client"))
    with coordinator(target_address, None, *tokens) as process:
        monkeypatch.setenv("TANDEM_CLIENT_ADDRESS", address_of(process))
        assert "has no token" in commands.fail(5, "admin", "status")
        assert "not known" in commands.fail(5, "admin", "status", "--token", "some-other-token")
        assert "is a client's" in commands.fail(
            5, "admin", "status", "--token-file", str(tmp_path / "client")
        )
        assert "has no token" in commands.fail(5, "generate", PROMPT)
        # Health checks need no token, so that probes work.
        assert commands.succeed("admin", "health") == "healthy: serving\n"
        diagnosis = commands.run("admin", "doctor")
        assert (diagnosis.code, diagnosis.err) == (5, "")
        assert "--token-file" in diagnosis.out
        monkeypatch.setenv("TANDEM_CLIENT_TOKEN_FILE", str(tmp_path / "admin"))
        assert "ready" in commands.succeed("admin", "status")
        commands.succeed("context", "set", "here", "--token", ADMIN_TOKEN)
        monkeypatch.delenv("TANDEM_CLIENT_TOKEN_FILE")
        assert "ready" in commands.succeed("admin", "status"), "the context has the token"
        assert ADMIN_TOKEN not in commands.succeed("context", "list", "-o", "json")
        assert ADMIN_TOKEN not in commands.succeed("admin", "config", "show", "-o", "json")

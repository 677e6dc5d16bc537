"""Every verb of `tandem admin` against real processes, in every output format, and its errors."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.cli.main import app
from tandem.client import Client
from tandem.errors import AbortedError, TandemError
from tandem.types import GenerationRequest
from tests.commands import Commands
from tests.end_to_end.processes import TANDEM, address_of, coordinator, run, service
from tests.snapshots import assert_matches

PROMPT = "def area(width, height):\n    area = width"


def complete(address: str, count: int, max_tokens: int) -> list[TandemError | None]:
    """Run this many completions at once, and return the error of each, None for those that succeeded."""
    request = GenerationRequest(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def complete_one(client: Client) -> TandemError | None:
        try:
            async for _ in client.generate(request):
                pass
        except TandemError as error:
            return error
        return None

    async def complete_all() -> list[TandemError | None]:
        async with Client(address) as client:
            return await asyncio.gather(*(complete_one(client) for _ in range(count)))

    return asyncio.run(complete_all())


@contextmanager
def busy(address: str, count: int) -> Iterator[list[TandemError | None]]:
    """Run long completions during the block; the list holds their errors after it."""
    errors: list[TandemError | None] = []
    thread = threading.Thread(target=lambda: errors.extend(complete(address, count, 900)))
    thread.start()
    try:
        yield errors
    finally:
        thread.join()


def stable(text: str, cluster: str, target: str, draft: str) -> str:
    """Replace the parts of an output that vary: addresses, ids, times, counts, and the column widths that follow."""
    for address, name in ((cluster, "COORDINATOR"), (target, "TARGET"), (draft, "DRAFT")):
        text = text.replace(address, name)
    for pattern, name in (
        (r"\b[0-9a-f]{64}\b", "HASH"),
        (r"\b[0-9a-f]{32}\b", "ID"),
        (r"^[0-9a-f]{12}\b", "ID"),
        (r"\d{4}-\d\d-\d\dT[\d:.+-]+", "TIME"),
        (r"\d\d:\d\d:\d\d by", "TIME by"),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"\b\d+\.\d+\.\d+\b", "VERSION"),
        (r"(?<![\w.])-?\d+(,\d{3})*(\.\d+)?(e-\d+)?", "#"),
        (r"[█▏▎▍▌▋▊▉]+", ""),
        (r"(#[mhds] ?)+", "AGE "),
        (r"(?<=\S) {2,}", "  "),
        (r" +$", ""),
        # A step profile has as many points as there was time for.
        (r'\[\s*(\{\s*"sequences": #,\s*"tokens": #,\s*"seconds": #\s*\},?\s*)+\]', "[STEPS]"),
        # What the controller says of it follows what was measured.
        (r"predicted #x[^\"]*", "predicted #x, ..."),
        # One entry for each position of the longest proposal.
        (r"\[\s*#(,\s*#)*\s*\]", "[#]"),
        (r"( *- #\n)( *- #\n)+", r"\1"),
        (r"(#  #%  #%\n)+", r"\1"),
    ):
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text


def documents(form: str, text: str) -> list[Any]:
    """Parse an output in JSON or YAML: one document, or one for each repetition."""
    if form == "yaml":
        return [*yaml.safe_load_all(text)]
    found, rest = [], text.strip()
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found


pytestmark = pytest.mark.slow
ADMIN_TOKEN, CLIENT_TOKEN = "an-admin-token-for-tests", "a-client-token-for-tests"


@pytest.fixture(scope="module")
def target(target_address: str) -> str:
    return target_address


@pytest.fixture(scope="module")
def draft() -> Iterator[str]:
    """A draft without a model: it loads at once, and the prompt repeats enough for n-gram proposals."""
    arguments = ("--speculative-method", "ngram", "--prompt-lookup-max", "3", "--prompt-lookup-min", "1")
    with service("draft_service", *arguments) as process:
        yield address_of(process)


@pytest.fixture(scope="module")
def cluster(target: str, draft: str) -> Iterator[str]:
    """A coordinator that has completed a request."""
    # Speculation stays on, however little it gains on a busy machine.
    with coordinator(
        target, draft, "--speculation-policy", "fixed", "--draft-patience-seconds", "30"
    ) as process:
        address = address_of(process)
        assert len(complete(address, 1, 24)) == 1
        yield address


@pytest.fixture
def commands(
    cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Commands:
    monkeypatch.setenv("TANDEM_CLIENT_ADDRESS", cluster)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return Commands(monkeypatch, capsys)


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
    commands: Commands, cluster: str, target: str, draft: str, verb: str
) -> None:
    words = ["admin", *(target if word == "TARGET" else word for word in VERBS[verb])]
    out = commands.succeed(*words, "-o", "json")
    assert_matches(f"admin/{verb}.json.txt", stable(out, cluster, target, draft))
    told = documents("json", out)
    assert len(told) == (2 if verb == "stats-watch" else 1)
    assert keys(documents("yaml", commands.succeed(*words, "-o", "yaml"))) == keys(told)
    assert commands.succeed(*words).strip()


def test_status_and_replicas_may_be_watched(commands: Commands) -> None:
    for verb in (("status",), ("replicas", "list")):
        out = commands.succeed("admin", *verb, "-w", "--interval", "0.1", "--count", "2", "-o", "json")
        first, second = documents("json", out)
        assert keys(first) == keys(second)


def keys(value: object) -> object:
    """The names in a document, without its values."""
    if isinstance(value, dict):
        return {name: keys(each) for name, each in value.items() if name != "hits_by_rank"}
    return keys(value[0]) if isinstance(value, list) and value else None


def test_requests_are_listed_shown_and_aborted(
    commands: Commands, cluster: str, target: str, draft: str
) -> None:
    def running() -> str:
        listed: list[Any] = []
        while not listed or not listed[0]["speculation"]["drafted"]:
            listed = json.loads(commands.succeed("admin", "requests", "list", "-o", "json"))
        return str(listed[0]["request_id"])

    outs: dict[str, str] = {}
    with busy(cluster, 1) as errors:
        request_id = running()
        outs["requests-list"] = commands.succeed("admin", "requests", "list", "-o", "json")
        outs["requests-show"] = commands.succeed("admin", "requests", "show", request_id[:16], "-o", "json")
        abort = ("admin", "requests", "abort", request_id, "--reason", "making room", "-o", "json")
        outs["requests-abort"] = commands.succeed(*abort)
    (error,) = errors
    assert isinstance(error, AbortedError)
    assert re.search(r"an administrator ended the request after \d+ tokens: making room$", str(error))
    assert json.loads(commands.succeed("admin", "requests", "list", "-o", "json")) == []
    assert "begins with" in commands.fail(5, "admin", "requests", "show", request_id)
    for verb, out in outs.items():
        assert_matches(f"admin/{verb}.json.txt", stable(out, cluster, target, draft))


def test_options_are_set_and_reset(commands: Commands, cluster: str, target: str, draft: str) -> None:
    setting = "admin config set num_speculative_tokens 6 rejection-sample-method=strict -o json"
    resetting = "admin config reset num_speculative_tokens rejection_sampling_strategy -o json"
    changed, back = commands.succeed(*setting.split()), commands.succeed(*resetting.split())
    assert_matches("admin/config-set.json.txt", stable(changed, cluster, target, draft))
    assert_matches("admin/config-reset.json.txt", stable(back, cluster, target, draft))


def test_a_replica_is_drained_and_resumed(commands: Commands, cluster: str, target: str, draft: str) -> None:
    drained = commands.succeed("admin", "replicas", "drain", draft, "-o", "json")
    resumed = commands.succeed("admin", "replicas", "resume", draft, "-o", "json")
    assert_matches("admin/replicas-drain.json.txt", stable(drained, cluster, target, draft))
    assert_matches("admin/replicas-resume.json.txt", stable(resumed, cluster, target, draft))


def test_draining_the_last_target_needs_yes(commands: Commands, target: str) -> None:
    refusal = commands.fail(2, "admin", "replicas", "drain", target)
    assert refusal == (
        f"{target} is the last target that takes new sequences; to drain it all the same, give --yes"
    )
    try:
        commands.succeed("admin", "replicas", "drain", target, "--yes")
        unhealthy = commands.run("admin", "health")
        assert (unhealthy.code, unhealthy.err) == (3, "")
        assert unhealthy.out.startswith("unhealthy: unavailable")
        diagnosis = commands.run("admin", "doctor")
        assert (diagnosis.code, diagnosis.err) == (3, "")
        assert "✗  targets" in diagnosis.out
        assert f"tandem admin replicas resume {target}" in diagnosis.out
    finally:
        commands.succeed("admin", "replicas", "resume", target)
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
    commands: Commands, target: str, monkeypatch: pytest.MonkeyPatch, answer: str, is_drained: bool
) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(answer + "\n"))
    ran = commands.run("admin", "replicas", "drain", target)
    assert "Drain it? [y/N] " in ran.err, "the question is not part of the result"
    assert (ran.code, bool(ran.out)) == ((0, True) if is_drained else (1, False))
    if is_drained:
        commands.succeed("admin", "replicas", "resume", target)


def test_unknown_replicas_requests_and_options_are_named(commands: Commands, target: str, draft: str) -> None:
    known = f"there are: {target}, {draft}"
    for verb in ("show", "drain", "resume"):
        assert known in commands.fail(5, "admin", "replicas", verb, "127.0.0.1:1")
    assert "no request that runs" in commands.fail(5, "admin", "requests", "abort", "abc")
    assert "there is no option nothing" in commands.fail(5, "admin", "config", "show", "nothing")


def test_the_shell_completes_addresses(cluster: str, target: str, draft: str) -> None:
    environment = {
        "_TANDEM_COMPLETE": "complete_bash",
        "COMP_WORDS": "tandem admin replicas show 127",
        "COMP_CWORD": "4",
        "TANDEM_CLIENT_ADDRESS": cluster,
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="tandem")
    assert sorted(result.stdout.split()) == sorted([target, draft])


def test_an_unreachable_coordinator_is_named(commands: Commands) -> None:
    """Once in a process of its own, to see the exit code and both streams."""
    result = run(TANDEM, "admin", "status", "--address", "127.0.0.1:1")
    assert (result.returncode, result.stdout) == (4, "")
    (line,) = result.stderr.splitlines()
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
    target: str, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, token in (("admin", ADMIN_TOKEN), ("client", CLIENT_TOKEN)):
        (tmp_path / name).write_text(token + "\n", encoding="utf-8")
    tokens = ("--admin-token-file", str(tmp_path / "admin"), "--auth-token-file", str(tmp_path / "client"))
    with coordinator(target, None, *tokens) as process:
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

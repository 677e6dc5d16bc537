"""Every verb of `tandem admin` against real processes, in every form of output, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.clients.aio import Client
from tandem.errors import AbortedError, TandemError
from tandem.types import GenerationRequest
from tests.commands import Commands
from tests.end_to_end.processes import TANDEM, address_of, coordinator, model_service, run, service
from tests.paths import DEMO_TARGET
from tests.snapshots import assert_matches

pytestmark = pytest.mark.slow

FORMS = ("table", "json", "yaml")
PROMPT = "def area(width, height):\n    area = width"
ADMIN_TOKEN, CLIENT_TOKEN = "an-admin-token-for-tests", "a-client-token-for-tests"


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with model_service("target_service", DEMO_TARGET) as process:
        yield address_of(process)


@pytest.fixture(scope="module")
def draft() -> Iterator[str]:
    """Without a model: nothing to load, and what the prompt repeats is enough to propose."""
    arguments = ("--speculative-method", "ngram", "--prompt-lookup-max", "3", "--prompt-lookup-min", "1")
    with service("draft_service", *arguments) as process:
        yield address_of(process)


@pytest.fixture(scope="module")
def cluster(target: str, draft: str) -> Iterator[str]:
    """A coordinator that has completed something."""
    # Whether the draft pays on a busy machine is not what is tested: speculation stays on.
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


def complete(address: str, count: int, max_tokens: int) -> list[TandemError | None]:
    """How as many completions side by side ended."""

    request = GenerationRequest(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def one(client: Client) -> TandemError | None:
        try:
            async for _ in client.generate(request):
                pass
        except TandemError as error:
            return error
        return None

    async def all_of_them() -> list[TandemError | None]:
        async with Client(address) as client:
            return await asyncio.gather(*(one(client) for _ in range(count)))

    return asyncio.run(all_of_them())


@contextmanager
def busy(address: str, count: int) -> Iterator[list[TandemError | None]]:
    """Long completions run for as long as the block lasts; how they ended is known after it."""
    ends: list[TandemError | None] = []
    thread = threading.Thread(target=lambda: ends.extend(complete(address, count, 900)))
    thread.start()
    try:
        yield ends
    finally:
        thread.join()


def steady(text: str, cluster: str, target: str, draft: str) -> str:
    """Without what is different each time: addresses, ids, times, counts, and the widths of columns that follow."""
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
        # As many positions as the longest proposal had.
        (r"\[\s*#(,\s*#)*\s*\]", "[#]"),
        (r"( *- #\n)( *- #\n)+", r"\1"),
        (r"(#  #%  #%\n)+", r"\1"),
    ):
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text


def parsed(form: str, text: str) -> Any:
    return json.loads(text) if form == "json" else yaml.safe_load(text)


VERBS = {
    "status": ("status",),
    "replicas-list": ("replicas", "list"),
    "replicas-show": ("replicas", "show", "TARGET"),
    "stats": ("stats",),
    "stats-watch": ("stats", "--watch", "--interval", "0.1", "--count", "2"),
    "config-show": ("config", "show", "--live"),
    "health": ("health",),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_shown(
    commands: Commands, cluster: str, target: str, draft: str, verb: str, form: str
) -> None:
    words = [target if word == "TARGET" else word for word in VERBS[verb]]
    out = commands.succeed("admin", *words, "-o", form)
    if verb == "stats-watch":
        if form == "json":
            assert len([json.loads(line) for line in out.splitlines()]) == 2
        elif form == "yaml":
            assert len([*yaml.safe_load_all(out)]) == 2
    elif form != "table":
        parsed(form, out)
    assert_matches(f"admin/{verb}.{form}.txt", steady(out, cluster, target, draft))


@pytest.mark.parametrize("form", FORMS)
def test_requests_are_listed_shown_and_ended(
    commands: Commands, cluster: str, target: str, draft: str, form: str
) -> None:
    with busy(cluster, 1) as ends:
        listed: list[Any] = []
        while not listed or not listed[0]["speculation"]["drafted"]:
            listed = json.loads(commands.succeed("admin", "requests", "list", "-o", "json"))
        request_id = listed[0]["request_id"]
        outs = {
            "requests-list": commands.succeed("admin", "requests", "list", "-o", form),
            "requests-show": commands.succeed("admin", "requests", "show", request_id[:16], "-o", form),
            "requests-abort": commands.succeed(
                "admin", "requests", "abort", request_id, "--reason", "making room", "-o", form
            ),
        }
    (end,) = ends
    assert isinstance(end, AbortedError)
    assert re.search(r"an administrator ended the request after \d+ tokens: making room$", str(end))
    assert json.loads(commands.succeed("admin", "requests", "list", "-o", "json")) == []
    assert "begins with" in commands.fail(5, "admin", "requests", "show", request_id)
    for verb, out in outs.items():
        assert_matches(f"admin/{verb}.{form}.txt", steady(out, cluster, target, draft))


@pytest.mark.parametrize("form", FORMS)
def test_a_change_of_the_configuration(
    commands: Commands, cluster: str, target: str, draft: str, form: str
) -> None:
    changed = commands.succeed(
        "admin", "config", "set", "num_speculative_tokens", "6", "rejection-sample-method=strict", "-o", form
    )
    back = commands.succeed(
        "admin", "config", "reset", "num_speculative_tokens", "rejection_sampling_strategy", "-o", form
    )
    assert_matches(f"admin/config-set.{form}.txt", steady(changed, cluster, target, draft))
    assert_matches(f"admin/config-reset.{form}.txt", steady(back, cluster, target, draft))


def test_a_change_counts_for_the_next_request_and_for_none_that_runs(
    commands: Commands, cluster: str
) -> None:
    def listed() -> list[Any]:
        found: list[Any] = json.loads(commands.succeed("admin", "requests", "list", "-o", "json"))
        return found

    with busy(cluster, 1):
        while not (before := listed()):
            pass
        commands.succeed("admin", "config", "set", "num_speculative_tokens", "6")
        with busy(cluster, 1):
            while len(after := listed()) < 2:
                pass
            for report in after:
                with suppress(AssertionError):  # it may have come to its end
                    commands.succeed("admin", "requests", "abort", report["request_id"])
    commands.succeed("admin", "config", "reset", "num_speculative_tokens")
    assert [report["num_speculative_tokens"] for report in before] == [2]
    assert [report["num_speculative_tokens"] for report in after] == [2, 6]
    assert after[0]["request_id"] == before[0]["request_id"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("num_speculative_tokens", "0"), "num_speculative_tokens is 0; it must be at least 1"),
        (("port", "1"), "port cannot be changed while the coordinator runs"),
        (("rejection_sampling_strategy", "synthetic"), "the rule synthetic needs exactly one of"),
    ],
)
def test_a_change_that_breaks_a_rule(commands: Commands, words: tuple[str, ...], sentence: str) -> None:
    assert sentence in commands.fail(5, "admin", "config", "set", *words)


@pytest.mark.parametrize("form", FORMS)
def test_a_replica_is_drained_and_resumed(
    commands: Commands, cluster: str, target: str, draft: str, form: str
) -> None:
    drained = commands.succeed("admin", "replicas", "drain", draft, "-o", form)
    resumed = commands.succeed("admin", "replicas", "resume", draft, "-o", form)
    assert_matches(f"admin/replicas-drain.{form}.txt", steady(drained, cluster, target, draft))
    assert_matches(f"admin/replicas-resume.{form}.txt", steady(resumed, cluster, target, draft))


def test_the_last_target_needs_a_yes(commands: Commands, cluster: str, target: str, draft: str) -> None:
    refusal = commands.fail(2, "admin", "replicas", "drain", target)
    assert refusal == (
        f"{target} is the last target that takes new sequences; to drain it all the same, give --yes"
    )
    try:
        commands.succeed("admin", "replicas", "drain", target, "--yes")
        unhealthy = commands.run("admin", "health")
        assert (unhealthy.code, unhealthy.err) == (3, "")
        assert_matches("admin/health-drained.table.txt", steady(unhealthy.out, cluster, target, draft))
        ill = commands.run("admin", "doctor")
        assert (ill.code, ill.err) == (3, "")
        assert "✗  targets" in ill.out
        assert f"tandem admin replicas resume {target}" in ill.out
    finally:
        commands.succeed("admin", "replicas", "resume", target)
    assert commands.succeed("admin", "health").startswith("healthy: ready")


@pytest.mark.parametrize("form", FORMS)
def test_the_doctor_finds_no_problem(
    commands: Commands, cluster: str, target: str, draft: str, form: str
) -> None:
    out = commands.succeed("admin", "doctor", "-o", form)
    if form == "table":
        assert "0 problems" in out
        return
    told = parsed(form, out)
    assert told["healthy"] is True
    checks = {finding["check"] for finding in told["findings"]}
    assert {
        *(
            "address",
            "TLS",
            "round trip",
            "version",
            "clock",
            "targets",
            "drafts",
            "target",
            "draft",
            "models",
        ),
        *("rule", "load", "acceptance", "services"),
    } <= checks
    assert {finding["severity"] for finding in told["findings"]} <= {"ok", "warning"}
    assert all(
        set(finding) == {"check", "subject", "severity", "detail", "advice"} for finding in told["findings"]
    )


def test_all_of_the_configuration(commands: Commands) -> None:
    told = json.loads(commands.succeed("admin", "config", "show", "-o", "json"))
    assert [option["name"] for option in told] == list(CoordinatorSettings.model_fields)
    values = {option["name"]: (option["value"], option["origin"]) for option in told}
    assert values["port"] == (0, "command line")
    assert values["drain_timeout_seconds"][1] == "default"


@pytest.mark.parametrize(("answer", "is_drained"), [("n", False), ("", False), ("y", True)])
def test_a_person_is_asked(
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


def test_what_is_not_there(commands: Commands, target: str, draft: str) -> None:
    there = f"there are: {target}, {draft}"
    for verb in ("show", "drain", "resume"):
        assert there in commands.fail(5, "admin", "replicas", verb, "127.0.0.1:1")
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


def test_nobody_listens(commands: Commands) -> None:
    """A whole process, once: its exit code and its streams."""
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
    ill = commands.run("admin", "doctor", "--address", "127.0.0.1:1")
    assert (ill.code, ill.err) == (4, "")
    assert "Connect call failed" in ill.out or "refused" in ill.out


def test_a_wrong_token(
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
        # Health is open to all, so a probe needs no token.
        assert commands.succeed("admin", "health") == "healthy: serving\n"
        ill = commands.run("admin", "doctor")
        assert (ill.code, ill.err) == (5, "")
        assert "--token-file" in ill.out
        monkeypatch.setenv("TANDEM_CLIENT_TOKEN_FILE", str(tmp_path / "admin"))
        assert "ready" in commands.succeed("admin", "status")
        commands.succeed("context", "set", "here", "--token", ADMIN_TOKEN)
        monkeypatch.delenv("TANDEM_CLIENT_TOKEN_FILE")
        assert "ready" in commands.succeed("admin", "status"), "the context has the token"
        assert ADMIN_TOKEN not in commands.succeed("context", "list", "-o", "json")
        assert ADMIN_TOKEN not in commands.succeed("admin", "config", "show", "-o", "json")

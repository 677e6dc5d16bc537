"""Every sentence in docs/troubleshooting.md is printed by a command here, or appears in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.commands import Commands
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SENTENCES = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
PACKAGES = ("tandem", "coordinator", "draft_service", "target_service")
HTTP_PORT = "HTTP_PORT"

PRINTED = {
    "coordinator …: connection refused": (4, ("generate", "x", "--address", "127.0.0.1:1")),
    "coordinator …: an HTTP server": (4, ("generate", "x", "--address", HTTP_PORT)),
    "address is": (2, ("generate", "x", "--address", "https://127.0.0.1:50051")),
    "--model is …; there is": (2, ("up", "--model", "no/such/folder")),
    "--device is": (2, ("up", "--device", "tpu")),
    "host is": (2, ("serve", "coordinator", "--host", "0.0.0.0", "--target-address", "127.0.0.1:1")),
    "--model is missing": (2, ("serve", "draft")),
    "seed is": (2, ("generate", "x", "--seed", str(1 << 64))),
}
"""Sentences by their beginning: the exit code, and a command that ends with it."""


def printing(sentence: str) -> tuple[int, tuple[str, ...]] | None:
    return next((how for beginning, how in PRINTED.items() if sentence.startswith(beginning)), None)


def pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part.strip()) for part in sentence.split("…")), re.DOTALL)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    return Commands(monkeypatch, capsys)


class Silent(BaseHTTPRequestHandler):
    """Answers as HTTP servers do, and logs nothing."""

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - its name in http.server
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    """Serve HTTP without being a coordinator; yield the port."""
    server = HTTPServer(("127.0.0.1", 0), Silent)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every string of the source; … in place of what is filled in."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(map(constant, node.values)))
    return found


def constant(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…"


def test_there_are_twenty_sentences_and_each_has_an_answer() -> None:
    assert len(SENTENCES) == len(set(SENTENCES)) >= 20
    answers = re.split(r"^### .*$", PAGE, flags=re.MULTILINE)[1:]
    assert all(len(answer.partition("\n## ")[0].split()) >= 8 for answer in answers)


@pytest.mark.parametrize("sentence", [each for each in SENTENCES if printing(each)])
def test_a_command_prints_the_sentence(sentence: str, commands: Commands, http_port: int) -> None:
    how = printing(sentence)
    assert how is not None
    code, command = how
    printed = commands.fail(
        code, *(f"127.0.0.1:{http_port}" if word == HTTP_PORT else word for word in command)
    )
    assert pattern(sentence).match(printed), printed


@pytest.mark.parametrize("sentence", [each for each in SENTENCES if not printing(each)])
def test_the_sentence_appears_in_the_source(sentence: str, texts: list[str]) -> None:
    assert any(map(pattern(sentence).search, texts))

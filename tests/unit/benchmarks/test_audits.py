"""The script that audits servers of several projects: how it starts them, and the table that it prints."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audits import AuditsSettings, Decoding, Server, read_records, running, servers, table
from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError, ServiceUnavailableError

SERVES = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def settings(*words: str) -> AuditsSettings:
    return load_settings(AuditsSettings, words, "python -m benchmarks.audits")


def server(source: str) -> Server:
    return Server("a server", (sys.executable, "-c", source, "{port}"), (), (Decoding("alone"),))


def test_a_server_is_ready_when_it_answers_and_ends_afterwards(tmp_path: Path) -> None:
    with running(server(SERVES), tmp_path / "log") as url, urllib.request.urlopen(f"{url}/models") as answer:
        process = int(answer.read())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServiceUnavailableError, match="a server ended with exit code 1: no such model"),
        running(server("raise SystemExit('no such model')"), tmp_path / "log"),
    ):
        pytest.fail("it never served")


def test_only_servers_whose_programs_are_named_are_audited(tmp_path: Path) -> None:
    assert [each.name for each in servers(settings(), tmp_path)] == ["Tandem"]
    found = list(servers(settings("--vllm-python", "vllm/bin/python"), tmp_path))
    assert len(found) == 7
    assert {each.command[0] for each in found[1:]} == {str(Path("vllm/bin/python").absolute())}
    with pytest.raises(ConfigurationError, match="needs a model: name its file with --gguf"):
        list(servers(settings("--llama-server", "llama-server"), tmp_path))


RECORD: dict[str, Any] = {
    "server": "vLLM",
    "version": "0.32.0",
    "decoding": "ngram",
    "report": {
        "tokens": 7153,
        "max_log10": 3.71,
        "verdict": "not lossless",
        "findings": ["tokens are not drawn", "13 outside of top-p"],
        "speculation": {"tokens_per_pass": 1.653},
    },
}
FAILED = {"server": "vLLM", "version": "0.32.0", "decoding": "suffix", "failed": "it ended"}


def test_the_table_has_a_row_for_each_audit_and_says_which_could_not_be_made() -> None:
    assert table([RECORD, FAILED])[2:] == [
        "| vLLM | 0.32.0 | ngram | 7,153 | 1.65 | 10^3.7 | not lossless | tokens are not drawn; 13 outside of top-p |",
        "| vLLM | 0.32.0 | suffix |  |  |  | not audited | it ended |",
    ]


def test_records_are_read_again_and_other_lines_refused(tmp_path: Path) -> None:
    file = tmp_path / "audits.jsonl"
    assert read_records(file) == []
    file.write_text(f"{json.dumps(RECORD)}\n{json.dumps(FAILED)}\n", encoding="utf-8")
    assert read_records(file) == [RECORD, FAILED]
    file.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="its line 1 is no record of an audit"):
        read_records(file)

"""`tandem generate`: what it prints, on a terminal and elsewhere, and how it exits."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.end_to_end.processes import START_SECONDS, TANDEM, run, running, until
from tests.paths import DEMO_TARGET, ROOT

pytestmark = pytest.mark.slow

PROMPT = "def area(width, height):\n"
OPTIONS = ("--temperature", "0", "--max-tokens", "24", "--num-speculative-tokens", "4", "--ignore-eos")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def generate(address: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run(TANDEM, "generate", "--address", address, *OPTIONS, *arguments, stdin=stdin)


def generated(address: str, *arguments: str, stdin: str = "") -> Any:
    """The object that --json prints."""
    result = generate(address, *arguments, "--json", stdin=stdin)
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def expected(address: str) -> Any:
    return generated(address, PROMPT)


def test_json_says_everything(expected: Any) -> None:
    token_ids = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(PROMPT).ids
    assert {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"} <= set(expected)
    assert expected["text"]
    assert expected["finish_reason"] == "length"
    assert expected["usage"] == {"prompt_tokens": len(token_ids), "completion_tokens": 24}
    assert len(expected["token_ids"]) == 24
    speculation = expected["speculation"]
    for name in ("rounds", "drafted", "accepted", "acceptance_rate", "acceptance_length", "per_position"):
        assert name in speculation
    assert speculation["acceptance_rate"] == pytest.approx(
        speculation["accepted"] / speculation["drafted"], abs=1e-5
    )
    assert expected["timing"]["time_to_first_token_seconds"] > 0
    assert expected["timing"]["tokens_per_second"] > 0


def test_a_prompt_may_come_from_anywhere(address: str, expected: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    token_ids = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(PROMPT).ids
    ways = (
        generated(address, "--prompt-file", str(path)),
        generated(address, "--prompt-file", "-", stdin=PROMPT),
        generated(address, "--prompt-token-ids", ",".join(map(str, token_ids))),
    )
    assert [way["token_ids"] for way in ways] == [expected["token_ids"]] * 3
    assert [way["usage"] for way in ways] == [expected["usage"]] * 3


def test_without_speculation_the_target_says_the_same(address: str, expected: Any) -> None:
    alone = generated(address, PROMPT, "--no-speculation")
    assert alone["token_ids"] == expected["token_ids"]
    assert alone["speculation"]["drafted"] == 0 < expected["speculation"]["drafted"]


def test_a_seed_makes_a_completion_reproducible(address: str) -> None:
    options = (PROMPT, "--temperature", "1", "--top-k", "50", "--top-p", "0.95")
    first, again, other = (generated(address, *options, "--seed", seed) for seed in ("1", "1", "2"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_what_is_not_a_terminal_gets_the_text_alone(address: str, expected: Any) -> None:
    result = generate(address, PROMPT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == expected["text"] + "\n"


def test_a_terminal_shows_accepted_tokens_in_colour(address: str, expected: Any) -> None:
    shown = on_a_terminal(TANDEM, "generate", PROMPT, "--address", address, *OPTIONS)
    assert expected["speculation"]["accepted"] > 0, "there must be something to colour"
    assert "\x1b[32m" in shown
    assert ESCAPE.sub("", shown).replace("\r\n", "\n").startswith(expected["text"])
    plain = "".join(re.split(r"\x1b\[32m.*?\x1b\[0m", shown, flags=re.DOTALL))
    assert plain.strip(), "what the target supplied is not coloured"


def on_a_terminal(*command: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment | {"TERM": "xterm-256color"},
    ) as process:
        os.close(theirs)
        try:
            shown = b"".join(iter(lambda: _read(ours), b""))
            assert process.wait(START_SECONDS) == 0
        finally:
            process.kill()
            os.close(ours)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError as error:
        if error.errno == errno.EIO:  # the other side is closed
            return b""
        raise


def assert_refused(result: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    assert result.returncode == code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


def test_a_coordinator_that_is_not_there() -> None:
    assert_refused(generate("127.0.0.1:1", PROMPT), 4, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((PROMPT, "--temperature", "-1"), "temperature is -1"),
        (("--prompt-token-ids", "1,5000"), "token id 5000"),
        (("--prompt-token-ids", "1,x"), "--prompt-token-ids is '1,x'"),
        (("--prompt-file", "no/such/file"), "--prompt-file no/such/file cannot be read"),
        ((PROMPT, "--prompt-token-ids", "1"), "2 prompts were given"),
        ((), "0 prompts were given"),
        (("",), "the prompt is empty"),
    ],
)
def test_a_request_that_is_refused(address: str, arguments: tuple[str, ...], sentence: str) -> None:
    assert_refused(generate(address, *arguments), 5, sentence)


def test_an_option_that_does_not_exist(address: str) -> None:
    result = generate(address, PROMPT, "--no-such-option")
    assert result.returncode == 2
    assert "--no-such-option" in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_without_a_traceback(address: str) -> None:
    command = (TANDEM, "generate", PROMPT, "--address", address, "--max-tokens", "900", "--ignore-eos")
    with running(*command) as process:
        until(lambda: process.stdout != "", START_SECONDS, lambda: process.story)
        process.signal(signal.SIGINT)
        assert process.wait(START_SECONDS) != 0
        assert "Traceback" not in process.stderr


def test_the_module_is_the_command(address: str, expected: Any) -> None:
    """For where the console script is not on the path."""
    result = run(
        sys.executable, "-m", "coordinator.cli", "generate", "--address", address, *OPTIONS, PROMPT, "--json"
    )
    assert json.loads(result.stdout)["token_ids"] == expected["token_ids"]

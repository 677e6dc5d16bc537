"""`tandem generate` and `tandem plan`: what they print, on a terminal and elsewhere, and how they exit."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem_coordinator.cli.plan import measured_through, plan
from tests.commands import run_here
from tests.end_to_end.processes import AHEAD, START_SECONDS, TANDEM, address_of, coordinator, forked, until
from tests.paths import DEMO_TARGET, ROOT

pytestmark = pytest.mark.slow
PROMPT = "def area(width, height):\n"
OPTIONS = ("--temperature", "0", "--max-tokens", "24", "--num-speculative-tokens", "4", "--ignore-eos")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
COLOURED = re.compile(r"\x1b\[(?:1;)?32m.*?\x1b\[0m", re.DOTALL)
"""Green; bold where it was drafted ahead."""
BOLD = re.compile(r"\x1b\[1;32m")
GREEN = re.compile(r"\x1b\[32m")


def generate(address: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_here("generate", "--address", address, *OPTIONS, *arguments, stdin=stdin)


def generated(address: str, *arguments: str, stdin: str = "") -> Any:
    result = generate(address, *arguments, "--json", stdin=stdin)
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def expected(address: str) -> Any:
    return generated(address, PROMPT)


def test_json_contains_every_field(expected: Any) -> None:
    token_ids = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(PROMPT).ids
    assert {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"} <= set(expected)
    assert expected["text"]
    assert expected["finish_reason"] == "length"
    usage = dict(expected["usage"])
    assert 0 <= usage.pop("cached_tokens") < len(token_ids)
    assert usage == {"prompt_tokens": len(token_ids), "completion_tokens": 24}
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


def test_the_closing_line_reports_the_gain_of_the_draft(address: str, expected: Any) -> None:
    quiet = generate(address, PROMPT, "--quiet")
    result = generate(address, PROMPT)
    assert quiet.stdout == result.stdout == expected["text"] + "\n"
    assert (quiet.returncode, quiet.stderr) == (0, "")
    (line,) = result.stderr.splitlines()
    speculation = expected["speculation"]
    assert re.match(r"24 tokens in \d+\.\d\d s, \d+\.\d tokens/s; ", line)
    assert (
        f"{speculation['acceptance_rate']:.1%} of {speculation['drafted']} proposed tokens accepted" in line
    )
    assert f"{speculation['tokens_per_pass']:.2f} tokens per pass" in line
    saved = 24 - speculation["rounds"]
    assert f"{saved} {'pass' if saved == 1 else 'passes'} of the target saved" in line


def test_the_closing_line_says_why_there_was_no_speculation(address: str) -> None:
    line = generate(address, PROMPT, "--no-speculation").stderr
    assert line.endswith("; speculation off: the request asked for the target alone\n")
    assert generated(address, PROMPT, "--no-speculation")["speculation"]["state"]["is_on"] is False


def test_several_completions_follow_one_another(address: str) -> None:
    # Only under this rule a draft that is late on a busy machine changes no text.
    rule = ("--rejection-sampling-strategy", "strict")
    options = (PROMPT, "--temperature", "1", "--seed", "3", "-n", "2", *rule)
    lines = generate(address, *options, "--json").stdout.splitlines()
    first, second = map(json.loads, lines)
    assert (first["seed"], second["seed"]) == (3, 4)
    assert first["token_ids"] != second["token_ids"]
    shown = generate(address, *options)
    assert shown.stdout == f"--- 1 of 2\n{first['text']}\n--- 2 of 2\n{second['text']}\n"
    assert shown.stderr.startswith("48 tokens in ")


def test_the_models_template_renders_a_chat(address: str, expected: Any) -> None:
    # The demo pair's template is the message's content, so the answer is that of the plain prompt.
    assert generated(address, PROMPT, "--chat")["token_ids"] == expected["token_ids"]
    assert generated(address, PROMPT, "--chat", "--system", "x = 1")["token_ids"] != expected["token_ids"]


def test_log_probabilities_are_printed_for_each_token(address: str, expected: Any) -> None:
    printed = generated(address, PROMPT, "--logprobs", "2")
    assert printed["token_ids"] == expected["token_ids"]
    assert [entry["token_id"] for entry in printed["logprobs"]] == expected["token_ids"]
    assert "".join(entry["text"] for entry in printed["logprobs"]) == expected["text"]
    for entry in printed["logprobs"]:
        assert entry["top"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"]}, "greedy"
        assert len(entry["top"]) == 2
    shown = generate(address, PROMPT, "--logprobs", "2").stdout
    assert shown.startswith(expected["text"] + "\n\nTOKEN")
    assert len(shown.removeprefix(expected["text"]).splitlines()) == 2 + 1 + 24


def test_a_terminal_shows_accepted_tokens_in_colour_and_those_drafted_ahead_bold(
    paced_pair: tuple[str, str],
) -> None:
    with coordinator(*paced_pair, *AHEAD) as process:
        address = address_of(process)
        printed = generated(address, PROMPT)
        shown = on_a_terminal(TANDEM, "generate", PROMPT, "--address", address, *OPTIONS)
    ahead = printed["speculation"]["ahead"]
    marked = [each for each in printed["rounds"] if each["drafted_ahead"]]
    assert 0 < len(marked) == ahead["hits"] <= ahead["awaited"] < len(printed["rounds"])
    assert all(each["proposed"] for each in marked)
    assert BOLD.search(shown)
    assert GREEN.search(shown), "the first proposal was requested"
    assert "".join(COLOURED.split(shown)).strip(), "the target's tokens are not coloured"
    assert ESCAPE.sub("", shown).replace("\r\n", "\n").startswith(printed["text"])
    assert re.search(r"; \d+\.\d% of \d+ rounds drafted ahead", shown)


def test_a_chat_has_several_turns(address: str) -> None:
    chat = ("chat", "--address", address, *OPTIONS)
    result = run_here(*chat, stdin=f"{PROMPT.strip()}\n\n{PROMPT.strip()}\n")
    assert result.returncode == 0
    first, second = (line for line in result.stderr.splitlines() if "tokens per pass" in line)
    assert first.startswith(second[:9])
    alone = run_here(*chat, "--quiet", stdin=f"{PROMPT.strip()}\n")
    assert alone.stderr == ""
    assert result.stdout.startswith(alone.stdout)
    assert result.stdout != alone.stdout * 2, "the second answer has read the first"


def on_a_terminal(*command: str) -> str:
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
        if error.errno == errno.EIO:  # the command has closed the terminal
            return b""
        raise


def assert_refused(result: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    assert result.returncode == code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((PROMPT, "--temperature", "-1"), "temperature is -1"),
        (("--prompt-token-ids", "1,5000"), "token id 5000"),
        (("",), "the prompt is empty"),
    ],
)
def test_a_refused_request_is_one_sentence(address: str, arguments: tuple[str, ...], sentence: str) -> None:
    assert_refused(generate(address, *arguments), 5, sentence)


def test_the_http_port_is_recognized_as_the_wrong_one(target_address: str) -> None:
    with coordinator(target_address, None, "--http-port", "0") as process:
        address_of(process)
        port = process.line("http on ").rpartition(":")[2]
        assert_refused(generate(f"127.0.0.1:{port}", PROMPT), 4, "an HTTP server answers there")


def test_ctrl_c_ends_without_a_traceback(address: str) -> None:
    command = ("generate", PROMPT, "--address", address, "--max-tokens", "900", "--ignore-eos")
    with forked("tandem", *command) as process:
        until(lambda: process.stdout != "", START_SECONDS, lambda: process.story)
        process.signal(signal.SIGINT)
        assert process.wait(START_SECONDS) != 0
        assert "Traceback" not in process.stderr


async def test_a_plan_measures_every_length_and_the_acceptance(address: str) -> None:
    """No times are compared: every length must have one, and the demo draft must often be right."""
    measured = await measured_through(address, [2], 4, 0.0)
    assert set(measured) == {2}
    for batch, rounds in measured.items():
        assert len(rounds.steps.verify) == 5
        assert min(rounds.steps.verify) > 0.0
        assert min(rounds.steps.draft, rounds.steps.draft_question) > 0.0
        assert len(rounds.acceptance_rates) == 4
        assert 0.3 < rounds.acceptance_rates[0] < 1.0
        assert [row.tokens for row in plan(rounds, batch).lengths] == [0, 1, 2, 3, 4]


def test_a_pair_that_cannot_start_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with forked("tandem", "plan", "--target", str(tmp_path)) as process:
        assert process.wait() != 0
        assert process.stdout == ""
        (line,) = process.stderr.splitlines()
    assert line.startswith("error: the pair could not be measured: ")
    assert "config.json" in line

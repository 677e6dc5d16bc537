"""`tandem config show`, `tandem config check`, and the page that is made from the same classes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.settings.coordinator import ConfigSettings
from tests.paths import ROOT

RUNNER = CliRunner()


def test_show_prints_each_value_and_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    result = RUNNER.invoke(app, ["config", "show", "--json", "--num-speculative-tokens", "5"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed["num_speculative_tokens"] == {"value": 5, "from": "command line"}
    assert printed["relaxed_topk"] == {"value": 4, "from": "environment"}
    assert printed["relaxed_delta"] == {"value": 0.6, "from": "default"}
    assert set(printed) == set(ConfigSettings.model_fields)


def test_show_prints_a_table() -> None:
    result = RUNNER.invoke(app, ["config", "show", "--method", "ngram"])
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert lines["speculative_method"] == ["ngram", "command", "line"]
    assert lines["num_speculative_tokens"] == ["2", "default"]


def test_show_prints_the_named_options() -> None:
    words = ["config", "show", "num-speculative-tokens", "relaxed_topk", "-o", "json", "--relaxed-topk", "3"]
    printed = json.loads(RUNNER.invoke(app, words).stdout)
    assert printed == {
        "num_speculative_tokens": {"value": 2, "from": "default"},
        "relaxed_topk": {"value": 3, "from": "command line"},
    }
    assert RUNNER.invoke(app, ["config", "show", "relaxed_topk", "--output=yaml"]).stdout.startswith(
        "relaxed_topk:"
    )
    unknown = RUNNER.invoke(app, ["config", "show", "no_such_option"])
    assert (unknown.exit_code, unknown.stderr) == (2, "error: there is no option no_such_option\n")
    wrong = RUNNER.invoke(app, ["config", "show", "-o", "xml"])
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "error: --output is 'xml'; it must be one of table, json, yaml\n",
    )


def test_show_has_help() -> None:
    for option in ("-h", "--help"):
        result = RUNNER.invoke(app, ["config", "show", option])
        assert result.exit_code == 0
        assert "tandem config show [NAME]... [-o table|json|yaml]" in result.stdout


def test_show_refuses_as_the_coordinator_does() -> None:
    result = RUNNER.invoke(app, ["config", "show", "--relaxed-topk", "0", "--max-num-steps", "2"])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert RUNNER.invoke(app, ["config", "show", "--nonsense", "1"]).exit_code == 2


def test_check_accepts_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("method: ngram\nprompt_lookup_max: 4\nnum_speculative_tokens: 4\n")
    result = RUNNER.invoke(app, ["config", "check", str(path)])
    assert (result.exit_code, result.stdout) == (0, f"{path}: ok\n")


def test_check_takes_json(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens": 4}')
    result = RUNNER.invoke(app, ["config", "check", str(path)])
    assert (result.exit_code, result.stdout) == (0, f"{path}: ok\n")
    path.write_text('{"num_speculative_tokens": 4,}')
    result = RUNNER.invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 2
    assert "it is not valid json" in result.stderr


def test_check_takes_json_without_a_file() -> None:
    good = RUNNER.invoke(app, ["config", "check", '{"method": "ngram", "num_speculative_tokens": 4}'])
    assert (good.exit_code, good.stdout) == (0, "ok\n")
    bad = RUNNER.invoke(
        app, ["config", "check", '{"method": "ngram", "num_speculative_tokens": 0, "foo": 1}']
    )
    assert (bad.exit_code, bad.stderr.splitlines()) == (
        2,
        ["error: foo is not an option", "error: num_speculative_tokens is 0; it must be at least 1"],
    )


def test_check_prints_every_broken_rule_on_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        '[coordinator]\nmoe_backend = "triton"\nnum_speculative_tokens = 0\nrelaxed_topk = "x"\nenable_echo = true\n'
    )
    result = RUNNER.invoke(app, ["config", "check", str(path), "--section-name", "coordinator"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: relaxed_topk is 'x'; it must be an integer",
        "error: moe_backend is not available in this version: the draft model runs through transformers, which chooses "
        "its own kernels",
        "error: num_speculative_tokens is 0; it must be at least 1",
        "error: enable_echo is true; it must be false: the prompt is not streamed back; put it before the completion",
    ]


def test_check_names_a_missing_file() -> None:
    result = RUNNER.invoke(app, ["config", "check", "nowhere.toml"])
    assert result.exit_code == 2
    assert (
        result.stderr == "error: config_file is nowhere.toml; it cannot be read: No such file or directory\n"
    )


def test_the_page_of_options_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""

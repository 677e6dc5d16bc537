"""Command line over environment over file over default, and no place where an unknown option passes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.settings.coordinator import ConfigSettings, CoordinatorSettings
from draft_service.settings import DraftSettings
from tandem.config.layers import Origin, command_line, read_options
from tandem.config.options import Options
from tandem.errors import ConfigurationError
from tandem.settings import load_settings
from target_service.settings import TargetSettings

ADDRESS = ("--target-address", "127.0.0.1:1")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without variables except those of the test."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tandem.toml"
    path.write_text("num_speculative_tokens = 3\nrelaxed_topk = 3\nrelaxed_delta = 0.3\n")
    return path


def coordinator(*arguments: str) -> CoordinatorSettings:
    return load_settings(CoordinatorSettings, [*ADDRESS, *arguments], "coordinator")


def refusal(*arguments: str, cls: type[CoordinatorSettings | DraftSettings] = CoordinatorSettings) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_settings(cls, arguments, "a service")
    return str(error.value)


def test_sources_override_each_other_in_order(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NUM_SPECULATIVE_TOKENS", "4")
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    settings = coordinator("--num-speculative-tokens", "5", "--config-file", str(file))
    assert (settings.num_speculative_tokens, settings.relaxed_topk, settings.relaxed_delta) == (5, 4, 0.3)
    assert settings.typical_delta == 0.3


def test_the_origin_of_a_value_is_reported(file: Path) -> None:
    values, origins = read_options(
        ConfigSettings,
        ["--num-speculative-tokens", "5", "--prompt-lookup-max", "4"],
        {"TANDEM_RELAXED_TOPK": "4", "TANDEM_CONFIG_FILE": str(file)},
        "show",
    )
    assert origins == {
        "num_speculative_tokens": Origin.COMMAND_LINE,
        "prompt_lookup_max": Origin.COMMAND_LINE,
        "relaxed_topk": Origin.ENVIRONMENT,
        "config_file": Origin.ENVIRONMENT,
        "relaxed_delta": Origin.FILE,
        "prompt_lookup_min": Origin.INFERRED,
    }
    assert values["prompt_lookup_min"] == "4"


def test_precedence_knows_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SPECULATIVE_METHOD", "suffix")
    assert coordinator("--method", "ngram").speculative_method == "ngram"
    monkeypatch.setenv("TANDEM_METHOD", "suffix")
    assert coordinator("--speculative-method", "ngram").speculative_method == "ngram"


def test_the_json_form_is_as_strong_as_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NUM_SPECULATIVE_TOKENS", "3")
    form = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    settings = coordinator("--speculative-config", form)
    assert settings.speculative_method == "ngram"
    assert (settings.num_speculative_tokens, settings.prompt_lookup_min) == (4, 4)
    assert (
        coordinator("--speculative-config", form, "--num-speculative-tokens", "5").num_speculative_tokens == 5
    )
    monkeypatch.setenv("TANDEM_SPECULATIVE_CONFIG", '{"relaxed_topk": 7}')
    assert coordinator().relaxed_topk == 7


def test_a_services_own_variable_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NUM_SPECULATIVE_TOKENS", "3")
    monkeypatch.setenv("TANDEM_COORDINATOR_NUM_SPECULATIVE_TOKENS", "6")
    assert coordinator().num_speculative_tokens == 6


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NUM_SPECULATIVE_TOKENS", "")
    assert coordinator().num_speculative_tokens == 2


def test_services_read_their_options_from_one_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CONFIG_FILE", str(file))
    monkeypatch.setenv("TANDEM_MAX_LENGTH", "96")
    monkeypatch.setenv("TANDEM_MODEL", "small")
    monkeypatch.setenv("TANDEM_TARGET_MODEL", "big")
    monkeypatch.setenv("TANDEM_DRAFT_TOP_K", "9")
    draft = load_settings(DraftSettings, [], "draft")
    target = load_settings(TargetSettings, [], "target")
    assert (draft.checkpoint, draft.method, draft.draft_top_k) == (Path("small"), "standalone", 9)
    assert target.model == Path("big")
    assert draft.max_length == target.max_length == coordinator().max_length == 96
    assert coordinator().draft_top_k == 9


def test_where_the_draft_model_runs_may_be_said_in_maxs_words() -> None:
    settings = load_settings(DraftSettings, ["--model", "small", "--draft-devices", "gpu:1"], "draft")
    assert (settings.compute_device, settings.compute_dtype) == ("cuda:1", "bfloat16")


# ---- files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.toml", "[speculation]\nmethod = 'suffix'\n[other]\nx = 1\n"),
        ("c.yaml", "speculation:\n  method: suffix\nother:\n  x: 1\n"),
    ],
)
def test_a_section_of_a_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert (
        coordinator("--config-file", str(tmp_path / name), "--section-name", "speculation").speculative_method
        == "suffix"
    )


@pytest.mark.parametrize(
    ("name", "content", "section", "sentence"),
    [
        ("c.ini", "", None, "config_file is {}; its name must end in .toml, .yaml, .yml"),
        ("c.toml", "x", None, "config_file is {}; it is not valid toml: "),
        ("c.yaml", "x: [", None, "config_file is {}; it is not valid yaml: "),
        ("c.yaml", "- x", None, "config_file is {}; it must hold options, one a line"),
        ("c.toml", "[a]\n[b]\n", "z", "section_name is z; the sections of {} are: a, b"),
        ("c.toml", "a = 1", "a", "section_name is a; it must be a section of {} that holds options"),
    ],
)
def test_invalid_files_are_refused(
    tmp_path: Path, name: str, content: str, section: str | None, sentence: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    arguments = ["--config-file", str(path), *(("--section-name", section) if section else ())]
    assert refusal(*ADDRESS, *arguments).startswith(sentence.format(path))


# ---- what is no option


def test_unknown_on_the_command_line() -> None:
    assert refusal(*ADDRESS, "--num-speculative-token=4", "--pipeline-parallel-size", "2", "--x") == (
        "--num-speculative-token is not an option; did you mean --num-speculative-tokens?; "
        "--pipeline-parallel-size is not available in this version: a sequence's next step depends on the one before, "
        "so stages would wait for each other; set tensor_parallel_size; --x is not an option"
    )


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        (
            "TANDEM_NUM_SPECULATVE_TOKENS",
            "TANDEM_NUM_SPECULATVE_TOKENS is not an option; did you mean TANDEM_NUM_SPECULATIVE_TOKENS?",
        ),
        ("TANDEM_COORDINATOR_XYZ", "TANDEM_COORDINATOR_XYZ is not an option"),
        ("TANDEM_LOG_LEVEL", "TANDEM_LOG_LEVEL is not an option; did you mean TANDEM_COORDINATOR_LOG_LEVEL?"),
        (
            "TANDEM_COORDINATOR_LOG_LEVL",
            "TANDEM_COORDINATOR_LOG_LEVL is not an option; did you mean TANDEM_COORDINATOR_LOG_LEVEL?",
        ),
        (
            "TANDEM_COORDINATOR_PARALLEL_DRAFTING",
            "parallel_drafting is not available in this version: the method decides it: dflash proposes a block in one "
            "pass, the others token after token",
        ),
    ],
)
def test_unknown_in_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, sentence: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert refusal(*ADDRESS) == sentence


def test_variables_of_other_services_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_DRAFT_XYZ", "1")
    coordinator()
    assert refusal("--model", "x", cls=DraftSettings) == "TANDEM_DRAFT_XYZ is not an option"


def test_unknown_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("num_speculative_token = 3\n[inner]\nx = 1\n")
    assert refusal(*ADDRESS, "--config-file", str(path)) == (
        "num_speculative_token is not an option; did you mean num_speculative_tokens?; "
        "inner is not an option; if it is a section of the file, name it with section_name"
    )


def test_one_option_by_two_names() -> None:
    assert refusal(
        *ADDRESS, "--speculative-config", '{"method": "ngram", "speculative_method": "suffix"}'
    ) == (
        "speculative_method is ngram and suffix: speculative_method and method are one option; give it once"
    )


# ---- all at once


def test_unreadable_values_do_not_hide_broken_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NONSENSE", "1")
    sentence = refusal("--num-speculative-tokens", "many", "--relaxed-topk", "0", "--max-num-steps", "2")
    assert sentence == (
        "num_speculative_tokens is 'many'; it must be an integer; "
        "relaxed_topk is 0; it must be at least 1; "
        "--target-address is missing; give it, or set TANDEM_COORDINATOR_TARGET_ADDRESS; "
        "TANDEM_NONSENSE is not an option; "
        "max_num_steps is 2; it must be 1: each step of the target verifies a proposal, and its result decides on the "
        "next"
    )


def test_a_rule_ignores_unreadable_options() -> None:
    arguments = ("--rejection-sampling-strategy", "synthetic", "--synthetic-acceptance-rates", "0.9,x")
    assert refusal(*ADDRESS, *arguments) == "synthetic_acceptance_rates.1 is 'x'; it must be a number"


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
    assert wrong.exit_code == 2
    assert "'xml' is not one of 'table', 'json', 'yaml'" in wrong.stderr


def test_check_takes_json(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens": 4}')
    result = RUNNER.invoke(app, ["config", "check", str(path)])
    assert (result.exit_code, result.stdout) == (0, f"{path}: ok\n")
    path.write_text('{"num_speculative_tokens": 4,}')
    result = RUNNER.invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 2
    assert "it is not valid json" in result.stderr


def test_check_prints_every_broken_rule_on_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        '[coordinator]\ndraft_sample_method = "x"\nnum_speculative_tokens = 0\nrelaxed_topk = "x"\nenable_echo = true\n'
    )
    result = RUNNER.invoke(app, ["config", "check", str(path), "--section-name", "coordinator"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: num_speculative_tokens is 0; it must be between 1 and 128",
        "error: relaxed_topk is 'x'; it must be an integer",
        "error: draft_sample_method is not available in this version: the draft samples as the acceptance rule needs; "
        "set rejection_sampling_strategy",
        "error: enable_echo is true; it must be false: the prompt is not streamed back; put it before the completion",
    ]


SERVICES = [CoordinatorSettings, DraftSettings, TargetSettings]


@pytest.mark.parametrize("cls", SERVICES)
def test_the_help_lists_every_option_and_fits_a_terminal(cls: type[Options]) -> None:
    text = command_line(cls, "tandem serve x", 80).format_help()
    for name in cls.model_fields:
        assert len(re.findall(rf"^  --{name.replace('_', '-')},? ", text, re.MULTILINE)) == 1
        assert re.search(rf"TANDEM_([A-Z]+_)?{name.upper()}\b", re.sub(r"\s+", " ", text))
    too_long = [line for line in text.splitlines() if len(line) > 80]
    assert all(len(line.split()) <= 3 for line in too_long), "only what cannot be broken is longer"

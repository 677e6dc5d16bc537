"""Command line over environment over file over default; no unknown option passes; MAX's and vLLM's names count."""

from __future__ import annotations

import json
import os
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.acceptance.strategies import STRATEGIES
from tandem.config import SpeculativeConfig
from tandem.config import names as acceptance_names
from tandem.config.names import (
    LLAMA_CPP_NAMES,
    METHODS,
    OF_A_SERVICE,
    REFUSED_METHODS,
    REFUSED_OPTIONS,
    SGLANG_NAMES,
    as_torch,
    inferred_method,
    named_elsewhere,
)
from tandem.config.options import ALIASES, flag, unknown_option
from tandem.config.origin import Origin
from tandem.config.settings import FilledSettings, load_settings
from tandem.errors import ConfigurationError
from tandem_coordinator.settings.coordinator import ConfigSettings, CoordinatorSettings
from tandem_draft.settings import DraftSettings
from tandem_target.settings import TargetSettings
from tests.commands import Commands

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


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_settings(CoordinatorSettings, arguments, "a service")
    return str(error.value)


def test_sources_override_each_other_in_order(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_NUM_SPECULATIVE_TOKENS", "4")
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    settings = coordinator("--num-speculative-tokens", "5", "--config-file", str(file))
    assert (settings.num_speculative_tokens, settings.relaxed_topk, settings.relaxed_delta) == (5, 4, 0.3)
    assert settings.typical_delta == 0.3


def test_the_origin_of_a_value_is_reported(file: Path) -> None:
    values, origins = ConfigSettings.read(
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


def test_settings_of_a_process_know_the_origin_of_each_value(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    monkeypatch.setenv("TANDEM_COORDINATOR_PORT", "0")
    settings = coordinator("--method", "suffix", "--no-speculation", "--config-file", str(file))
    found = {
        name: (getattr(settings, name), settings.origins.get(name, Origin.DEFAULT))
        for name in (
            "speculative_method",
            "speculation",
            "port",
            "relaxed_topk",
            "relaxed_delta",
            "max_num_steps",
        )
    }
    assert found == {
        "speculative_method": ("suffix", Origin.COMMAND_LINE),
        "speculation": (False, Origin.COMMAND_LINE),
        "port": (0, Origin.ENVIRONMENT),
        "relaxed_topk": (4, Origin.ENVIRONMENT),
        "relaxed_delta": (0.3, Origin.FILE),
        "max_num_steps": (1, Origin.DEFAULT),
    }


def test_settings_made_in_python_read_no_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    monkeypatch.setenv("TANDEM_COORDINATOR_PORT", "7")
    settings = CoordinatorSettings(target_address="127.0.0.1:1")
    assert (settings.relaxed_topk, settings.port, dict(settings.origins)) == (10, 50051, {})


@pytest.mark.parametrize("fault", [{"relaxed_topk": 0}, {"relaxed_topk": 3, "x": 1}])
def test_every_way_to_make_settings_has_the_same_sentence(fault: dict[str, Any]) -> None:
    values = {"target_address": "127.0.0.1:1", **fault}
    with pytest.raises(ValidationError) as made:
        CoordinatorSettings(**values)
    with pytest.raises(ValidationError) as validated:
        CoordinatorSettings.model_validate(values)
    told = [[detail["msg"] for detail in error.value.errors()] for error in (made, validated)]
    assert told[0] == told[1]
    assert len(told[0]) == 1


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


@pytest.mark.parametrize(
    ("variables", "words", "option", "value"),
    [
        ({"SPECULATIVE_METHOD": "suffix"}, ("--method", "ngram"), "speculative_method", "ngram"),
        ({"METHOD": "suffix"}, ("--speculative-method", "ngram"), "speculative_method", "ngram"),
        ({"RELAXED_TOPK": "3", "COORDINATOR_RELAXED_TOPK": "6"}, (), "relaxed_topk", 6),
        ({"RELAXED_TOPK": ""}, (), "relaxed_topk", 10),
        ({"DRAFT_XYZ": "1"}, (), "relaxed_topk", 10),
    ],
    ids=["two spellings", "the other way", "a service's own", "an empty one", "another service's"],
)
def test_the_strongest_variable_counts(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: tuple[str, ...],
    option: str,
    value: object,
) -> None:
    for name, content in variables.items():
        monkeypatch.setenv(f"TANDEM_{name}", content)
    assert getattr(coordinator(*words), option) == value


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


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NUM_SPECULATVE_TOKENS", "TANDEM_{} is not an option; did you mean TANDEM_NUM_SPECULATIVE_TOKENS?"),
        ("COORDINATOR_XYZ", "TANDEM_{} is not an option"),
        ("LOG_LEVEL", "TANDEM_{} is not an option; did you mean TANDEM_COORDINATOR_LOG_LEVEL?"),
        ("COORDINATOR_PARALLEL_DRAFTING", "parallel_drafting is not available in this version: "),
    ],
)
def test_unknown_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, sentence: str) -> None:
    monkeypatch.setenv(f"TANDEM_{name}", "1")
    assert refusal(*ADDRESS).startswith(sentence.format(name))


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ("", ("--num-speculative-token=4", "--pipeline-parallel-size", "2", "--x"),
            "--num-speculative-token is not an option; did you mean --num-speculative-tokens?; "
            "--pipeline-parallel-size is not available in this version: a sequence's next step depends on the one "
            "before, so stages would wait for each other; set tensor_parallel_size; --x is not an option"),
        ("num_speculative_token = 3\n[inner]\nx = 1\n", (),
            "num_speculative_token is not an option; did you mean num_speculative_tokens?; "
            "inner is not an option; if it is a section of the file, name it with section_name"),
        ("", ("--speculative-config", '{"method": "ngram", "speculative_method": "suffix"}'),
            "speculative_method is ngram and suffix: speculative_method and method are one option; give it once"),
    ],
)  # fmt: skip
def test_unknown_elsewhere_or_twice(
    tmp_path: Path, content: str, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "c.toml").write_text(content)
    assert refusal(*ADDRESS, "--config-file", str(tmp_path / "c.toml"), *words) == sentence


def test_an_option_with_two_letters_swapped_is_found() -> None:
    known = {name: flag(name) for name in CoordinatorSettings.model_fields if len(name) <= 12}
    assert "port" in known
    for name in known:
        for index in range(len(name) - 1):
            swapped = name[:index] + name[index + 1] + name[index] + name[index + 2 :]
            if swapped != name:
                sentence = f"{flag(swapped)} is not an option; did you mean {flag(name)}?"
                assert unknown_option(flag(swapped), known) == sentence


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


def test_faults_of_all_sources_are_told_in_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("relaxed_delta: 7\nnum_speculative_token: 3\n")
    monkeypatch.setenv("TANDEM_COORDINATOR_HTTP_PRT", "1")
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "none")
    words = ("--port", "x", "--prt", "1", "--config-file", str(tmp_path / "c.yaml"))
    told = refusal(*ADDRESS, *words)
    for sentence in (
        "port is 'x'; it must be an integer",
        "relaxed_topk is 'none'; it must be an integer",
        "relaxed_delta is 7; it must be between 0 and 1",
        "--prt is not an option; did you mean --port?",
        "num_speculative_token is not an option; did you mean num_speculative_tokens?",
        "TANDEM_COORDINATOR_HTTP_PRT is not an option; did you mean TANDEM_COORDINATOR_HTTP_PORT?",
    ):
        assert sentence in told


@pytest.mark.parametrize("word", ["port", "x"])
def test_a_word_that_is_no_option_is_refused_by_name(word: str) -> None:
    assert refusal(*ADDRESS, word, "1") == f"{word} is not an option"


@pytest.mark.parametrize(
    ("words", "addresses"),
    [
        (("--draft-address", "a:1,b:2"), "a:1,b:2"),
        (("--draft-address", "a:1", "--draft-address=b:2"), "a:1,b:2"),
    ],
)
def test_an_option_may_be_given_several_times(words: tuple[str, ...], addresses: str) -> None:
    assert coordinator("--insecure", *words).draft_address == addresses


def test_a_rule_ignores_unreadable_options() -> None:
    arguments = ("--rejection-sampling-strategy", "synthetic", "--synthetic-acceptance-rates", "0.9,x")
    assert refusal(*ADDRESS, *arguments) == "synthetic_acceptance_rates.1 is 'x'; it must be a number"


COMMANDS = Commands()


def test_show_prints_each_value_and_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    printed = json.loads(COMMANDS.succeed("config", "show", "--json", "--num-speculative-tokens", "5"))
    assert printed["num_speculative_tokens"] == {"value": 5, "from": "command line"}
    assert printed["relaxed_topk"] == {"value": 4, "from": "environment"}
    assert printed["relaxed_delta"] == {"value": 0.6, "from": "default"}
    assert set(printed) == set(ConfigSettings.model_fields)


def test_show_names_the_command_line_the_environment_the_file_and_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    monkeypatch.setenv("TANDEM_NUM_SPECULATIVE_TOKENS", "4")
    words = ("--config-file", str(file), "--num-speculative-tokens", "5", "--json")
    printed = json.loads(COMMANDS.succeed("config", "show", *words))
    assert printed["num_speculative_tokens"] == {"value": 5, "from": "command line"}
    assert printed["relaxed_topk"] == {"value": 4, "from": "environment"}
    assert printed["relaxed_delta"] == {"value": 0.3, "from": "file"}
    assert printed["typical_delta"] == {"value": 0.3, "from": "default"}


@pytest.mark.parametrize("word", ["null", "none"])
def test_null_on_the_command_line_takes_a_value_back(word: str) -> None:
    name = "synthetic_acceptance_rate"
    variables = {f"TANDEM_{name.upper()}": "0.5"}
    values, origins = ConfigSettings.read([flag(name), word], variables, "tandem")
    settings = ConfigSettings(**values)
    assert settings.synthetic_acceptance_rate is None
    assert origins[name] == Origin.COMMAND_LINE


def test_what_is_inferred_where_a_value_was_taken_back_says_so() -> None:
    variables = {"TANDEM_SPECULATIVE_METHOD": "eagle", "TANDEM_DRAFT_MODEL_PATH": "a-draft"}
    values, origins = ConfigSettings.read(["--speculative-method", "null"], variables, "tandem")
    assert values["speculative_method"] == "standalone"
    assert origins["speculative_method"] == Origin.INFERRED


@pytest.mark.parametrize("word", ["null", "none"])
def test_null_is_an_error_for_an_option_that_always_has_a_value(word: str) -> None:
    assert refusal(*ADDRESS, "--relaxed-topk", word) == f"relaxed_topk is '{word}'; it must be an integer"


def test_show_prints_the_named_options() -> None:
    words = ("config", "show", "num-speculative-tokens", "relaxed_topk", "-o", "json", "--relaxed-topk", "3")
    printed = json.loads(COMMANDS.succeed(*words))
    assert printed == {
        "num_speculative_tokens": {"value": 2, "from": "default"},
        "relaxed_topk": {"value": 3, "from": "command line"},
    }
    assert COMMANDS.succeed("config", "show", "relaxed_topk", "--output=yaml").startswith("relaxed_topk:")
    assert COMMANDS.fail(2, "config", "show", "no_such_option") == "there is no option no_such_option"
    sentence = "--output is xml; it must be 'table', 'json' or 'yaml'"
    assert COMMANDS.fail(2, "config", "show", "-o", "xml") == sentence


def test_check_takes_json(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens": 4}')
    assert COMMANDS.succeed("config", "check", str(path)) == f"{path}: ok\n"
    path.write_text('{"num_speculative_tokens": 4,}')
    assert "it is not valid json" in COMMANDS.fail(2, "config", "check", str(path))


def test_check_prints_every_broken_rule_on_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        '[coordinator]\ndraft_sample_method = "x"\nnum_speculative_tokens = 0\nrelaxed_topk = "x"\nenable_echo = true\n'
    )
    ran = COMMANDS.run("config", "check", str(path), "--section-name", "coordinator")
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "error: num_speculative_tokens is 0; it must be between 1 and 128",
        "error: relaxed_topk is 'x'; it must be an integer",
        "error: draft_sample_method is not available in this version: the draft samples as the acceptance rule needs; "
        "set rejection_sampling_strategy",
        "error: enable_echo is true; it must be false: the prompt is not streamed back; put it before the completion",
    ]


SERVICES: list[type[FilledSettings]] = [CoordinatorSettings, DraftSettings, TargetSettings]


def shown(cls: type[FilledSettings], word: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a service print its help for this word, on a terminal of this width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        load_settings(cls, [word], "tandem serve x")
    assert ended.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("cls", SERVICES)
def test_the_whole_help_lists_every_option_and_fits_a_terminal(
    cls: type[FilledSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(cls, "--help-all", 80, monkeypatch)
    for name in cls.model_fields:
        assert len(re.findall(rf"^  --{name.replace('_', '-')},? ", text, re.MULTILINE)) == 1
        assert re.search(rf"TANDEM_([A-Z]+_)?{name.upper()}\b", re.sub(r"\s+", " ", text))
    too_long = [line for line in text.splitlines() if len(line) > 80]
    assert all(len(line.split()) <= 4 for line in too_long), "only flags, which cannot be broken, are longer"


@pytest.mark.parametrize("cls", SERVICES)
def test_the_help_fits_a_screen_and_says_where_the_rest_is(
    cls: type[FilledSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(cls, "--help", 80, monkeypatch)
    assert text == shown(cls, "-h", 80, monkeypatch)
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80
    listed = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert 10 <= len(listed) == len(set(listed)) <= 18
    assert {"--host", "--port", "--log-level"} <= set(listed)
    assert set(listed) < {flag(name) for name in cls.model_fields}
    assert text.count(":\n") >= 4, "options stand under headings"
    assert "--help-all lists all options" in text


def test_the_help_has_what_every_call_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, needed in zip(SERVICES, ("target-address", "model", "model"), strict=True):
        assert f"  --{needed} " in shown(cls, "--help", 100, monkeypatch)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("meta/Llama-68M", "standalone"),
        ("ngram", "ngram"),
        ("suffix", "suffix"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
    ],
)
def test_the_method_by_the_models_name(model: str, method: str) -> None:
    assert inferred_method(model) == method


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"model_type": "deepseek_mtp"}, "mtp"),
        ({"model_type": "llama"}, "standalone"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EAGLEModel"], "model_type": "eagle"}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "medusa"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "standalone"),
        # What says nothing is a model like any other.
        ("{", "standalone"),
        ([], "standalone"),
        ({"model_type": 3}, "standalone"),
    ],
)
def test_the_method_by_the_checkpoint(tmp_path: Path, config: Any, method: str) -> None:
    content = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(content)
    assert inferred_method(str(tmp_path)) == method


def test_a_method_may_be_given_as_the_model_and_one_that_is_named_is_not_inferred() -> None:
    config = SpeculativeConfig.model_validate({"model": "ngram"})
    assert (config.speculative_method, config.draft_model_path) == ("ngram", None)
    named = {"model": "my/eagle-like", "method": "draft_model"}
    assert SpeculativeConfig.model_validate(named).is_standalone()


@pytest.mark.parametrize(
    ("given", "expected"),
    [((None, None), (5, 5)), ((3, None), (3, 3)), ((None, 2), (2, 2)), ((2, 4), (2, 4))],
)
def test_one_end_of_a_lookup_sets_the_other(given: tuple[int | None, ...], expected: tuple[int, int]) -> None:
    config = SpeculativeConfig(prompt_lookup_min=given[0], prompt_lookup_max=given[1])
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_a_rate_list_may_be_one_word() -> None:
    for rates in ("0.9,0.5", "[0.9, 0.5]", [0.9, 0.5]):
        assert SpeculativeConfig(synthetic_acceptance_rates=rates).synthetic_acceptance_rates == (0.9, 0.5)


MAX_OPTIONS: dict[str, Any] = {
    "config_file": None,
    "section_name": None,
    "speculative_method": None,
    "num_speculative_tokens": 2,
    "rejection_sampling_strategy": None,
    "synthetic_acceptance_rate": None,
    "use_relaxed_acceptance_for_thinking": False,
    "relaxed_topk": 10,
    "relaxed_delta": 0.6,
    # Around its class:
    "draft_model_path": None,
    "draft_devices": None,
    "device_memory_utilization": None,
    "max_num_steps": 1,
    "max_length": None,
    "enable_echo": False,
    "enable_structured_output": False,
}
"""With MAX's defaults."""

VLLM_OPTIONS = (
    "num_speculative_tokens", "model", "method", "enforce_eager", "draft_tensor_parallel_size",
    "tensor_parallel_size", "quantization", "moe_backend", "draft_load_config", "revision", "code_revision",
    "max_model_len", "disable_padded_drafter_batch", "use_local_argmax_reduction", "prompt_lookup_max",
    "prompt_lookup_min", "speculative_token_tree", "parallel_drafting", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
    "rejection_sample_method", "draft_sample_method", "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification", "attention_backend", "use_heterogeneous_vocab", "index_share_for_mtp_iteration",
    "disable_eagle_block_drop", "dspark_draft_topk", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    "kv_cache_dtype", "disable_lookahead_block_hashes", "draft_lm_head_quantization", "xpress_topc", "fly_window_size",
    "fly_entropy_threshold", "fly_entropy_top_k",
)  # fmt: skip
"""Of vLLM 0.33 (vllm/config/speculative.py)."""
VLLM_DEFAULTS = {
    "prompt_lookup_min": 5,
    "prompt_lookup_max": 5,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}

MAX_METHODS = ("standalone", "eagle", "mtp")
VLLM_METHODS = (
    "ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "deepseek_mtp", "medusa",
    "mlp_speculator", "dflash", "dspark", "extract_hidden_states", "custom_class",
)  # fmt: skip

RULE_NAMES = (
    "greedy", "residual", "typical-acceptance", "logit-comparison",
    "strict", "probabilistic", "synthetic", "standard", "block",
)  # fmt: skip


NEWER_MAX_OPTIONS = ("use_greedy_acceptance", "draft_proposal", "num_speculative_tokens_per_batch_size")


def refused(**options: Any) -> str:
    with pytest.raises(ValidationError) as error:
        SpeculativeConfig(**options)
    (detail,) = error.value.errors()
    return detail["msg"]


@pytest.mark.parametrize("name", sorted({*MAX_OPTIONS, *NEWER_MAX_OPTIONS, *VLLM_OPTIONS}))
def test_an_option_is_supported_or_refused_by_name(name: str) -> None:
    if name in REFUSED_OPTIONS:
        assert refused(**{name: 1}) == f"{name} is not available in this version: {REFUSED_OPTIONS[name]}"
        SpeculativeConfig(**{name: None})  # null is not given, as in vLLM
    elif name in OF_A_SERVICE:
        assert refused(**{name: 1}) == f"{name} is not an option: {OF_A_SERVICE[name]}"
        assert name in DraftSettings.model_fields
    else:
        assert ALIASES.get(name, name) in SpeculativeConfig.model_fields


SGLANG = (
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk",
    "--speculative-num-draft-tokens", "--speculative-accept-threshold-single", "--speculative-token-map",
    "--speculative-ngram-max-trie-depth", "--speculative-use-block-verification", "--speculative-adaptive",
    "--decoupled-spec-role", "--decoupled-spec-connect-endpoints",
)  # fmt: skip
LLAMA_CPP = (
    "--model-draft", "--draft", "--draft-max", "--draft-min", "--draft-p-min", "--device-draft", "--spec-type",
    "--spec-draft-model", "--spec-draft-n-max", "--spec-draft-p-split", "--spec-ngram-size-n", "--spec-draft-poll",
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "whose"), [(SGLANG, "SGLang's"), (LLAMA_CPP, "llama.cpp's")], ids=["sglang", "llama.cpp"]
)
def test_options_of_other_servers_are_answered_by_name(flags: tuple[str, ...], whose: str) -> None:
    for given in flags:
        assert unknown_option(given, {}).startswith(f"{given} is not an option: it is {whose}")


def test_what_others_call_differently_is_an_option_here() -> None:
    known = {
        name
        for settings in (CoordinatorSettings, DraftSettings, TargetSettings)
        for name in settings.model_fields
    }
    words = [*SGLANG_NAMES.values(), *LLAMA_CPP_NAMES.values()]
    named = [re.search(r"here it is called (\w+)(?: and (\w+))?", each) for each in words]
    found = {name for match in named if match is not None for name in match.groups() if name is not None}
    assert len(found) > 10
    assert found <= known
    # An option of ours is never taken for one of theirs.
    assert [name for name in sorted(known) if named_elsewhere(name)] == []


def test_the_length_in_vllms_json_form_is_the_drafts() -> None:
    config = SpeculativeConfig.model_validate(
        {"speculative_config": {"max_model_len": 512}, "max_model_len": 4096}
    )
    assert (config.draft_max_length, config.max_length) == (512, 4096)


@pytest.mark.parametrize(("name", "default"), [*MAX_OPTIONS.items(), *VLLM_DEFAULTS.items()])
def test_defaults_are_the_references(name: str, default: object) -> None:
    assert getattr(SpeculativeConfig(), name) == default


@pytest.mark.parametrize("method", [*MAX_METHODS, *VLLM_METHODS])
def test_a_method_is_supported_or_refused_by_name(method: str) -> None:
    canonical = {"draft_model": "standalone", "deepseek_mtp": "mtp"}.get(method, method)
    if canonical in METHODS:
        assert SpeculativeConfig(speculative_method=method).speculative_method == canonical
    else:
        assert refused(method=method).endswith(f"not available in this version: {REFUSED_METHODS[canonical]}")


@pytest.mark.parametrize("name", RULE_NAMES)
def test_an_acceptance_rule_goes_by_either_name(name: str) -> None:
    for spelled in (name, name.upper(), name.replace("-", "_")):
        config = SpeculativeConfig.model_validate({"rejection_sample_method": spelled})
        known_as = config.rejection_sampling_strategy
        assert known_as is not None
        assert acceptance_names.canonical_name(known_as) == acceptance_names.canonical_name(name)


def test_names_of_acceptance_rules_are_those_of_the_rules() -> None:
    assert {strategy.name for strategy in STRATEGIES} == set(acceptance_names.NAMES)
    assert set(acceptance_names.RULE_ALIASES.values()) <= set(acceptance_names.NAMES)


@pytest.mark.parametrize(
    ("options", "predicates"),
    [
        ({}, set()),
        ({"method": "draft_model"}, {"is_standalone"}),
        ({"method": "eagle3"}, {"is_eagle", "uses_typical_acceptance"}),
        ({"method": "mtp", "rejection_sampling_strategy": "strict"}, {"is_mtp"}),
        ({"rejection_sampling_strategy": "greedy"}, {"uses_greedy_rejection"}),
        ({"rejection_sampling_strategy": "logit_comparison"}, {"uses_logit_comparison"}),
        ({"rejection_sampling_strategy": "typical"}, {"uses_typical_acceptance"}),
        ({"method": "eagle", "synthetic_acceptance_rate": 0.7}, {"is_eagle"}),
    ],
)
def test_maxs_predicates(options: dict[str, Any], predicates: set[str]) -> None:
    config = SpeculativeConfig(**options)
    names = ("is_standalone", "is_eagle", "is_mtp", "uses_greedy_rejection", "uses_logit_comparison")
    assert {name for name in (*names, "uses_typical_acceptance") if getattr(config, name)()} == predicates


@pytest.mark.parametrize(
    ("name", "device"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("gpu", "cuda"), ("cuda:1", "cuda:1"), ("gpu:12", "cuda:12")],
)
def test_gpu_and_cuda_are_the_same_everywhere(name: str, device: str) -> None:
    assert as_torch(name) == device
    assert TargetSettings(model=Path(), device=name).compute_device == device
    assert DraftSettings(device=name).compute_device == device
    draft = DraftSettings(draft_devices=name)
    assert (draft.compute_device, draft.compute_dtype == "bfloat16") == (device, device != "cpu")


@pytest.mark.parametrize("name", ["", "tpu", "cpu:0", "cuda:", "cuda:x", "CUDA", "gpu0", "cuda:0,1"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="it must be cpu, cuda, cuda:N, gpu or gpu:N"):
        TargetSettings(model=Path(), device=name)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"method": "[ngram]", "enforce_eager": False}, {"speculative_method": "ngram"}),
        ({"method": "ngram", "parallel_drafting": False, "use_local_argmax_reduction": False}, {}),
        ({"method": "dflash", "parallel_drafting": True}, {"speculative_method": "dflash"}),
        ({"method": "ngram", "tensor_parallel_size": 1}, {"draft_tensor_parallel_size": 1}),
        ({"method": "suffix"}, {"num_speculative_tokens": 24}),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 8}, {"num_speculative_tokens": 8}),
        ({"method": "suffix", "num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
    ],
)
def test_vllms_defaults_mean_what_they_mean_there(options: dict[str, Any], changed: dict[str, Any]) -> None:
    config = SpeculativeConfig(speculative_config=json.dumps(options))
    assert {name: getattr(config, name) for name in changed} == changed


def test_a_head_says_how_many_tokens_it_proposes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_predict": 3, "model_type": "llama"}')
    assert SpeculativeConfig(draft_model_path=str(tmp_path)).num_speculative_tokens == 3


BY_LOAD = ((1, 4, 4), (5, 16, 2))


@pytest.mark.parametrize("name", ["speculation_policy", "num_speculative_tokens_per_batch_size"])
@pytest.mark.parametrize("value", ["[[1,4,4],[5,16,2]]", [[1, 4, 4], [5, 16, 2]], BY_LOAD])
def test_lengths_by_load_are_vllms(name: str, value: object) -> None:
    """Also inside its JSON form, and again after they were written out."""
    for options in ({name: value}, {"speculative_config": {name: value}}):
        config = SpeculativeConfig.model_validate({"num_speculative_tokens": 4, **options})
        assert config.speculation_policy == BY_LOAD
        written = config.model_dump(mode="json")["speculation_policy"]
        assert (
            SpeculativeConfig(num_speculative_tokens=4, speculation_policy=written).speculation_policy
            == BY_LOAD
        )


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("quick", "it must be adaptive, fixed, or lengths by load, such as [[1,4,4],[5,16,2]]: from, to, K"),
        ("[]", "it must be adaptive, fixed, or lengths by load"),
        ("[1,4,4]", "it must be adaptive, fixed, or lengths by load"),
        ("[[1,4]]", "it must be adaptive, fixed, or lengths by load"),
        ("{}", "it must be adaptive, fixed, or lengths by load"),
        ("3", "it must be adaptive, fixed, or lengths by load"),
        ('[[1,"4",2]]', "[1, '4', 2] must be three whole numbers: from, to, K"),
        ("[[1,4,true]]", "[1, 4, True] must be three whole numbers"),
        ("[[2,4,2]]", "[2, 4, 2] must begin at load 1: neither gaps nor overlaps are allowed"),
        ("[[1,4,2],[6,8,1]]", "[6, 8, 1] must begin at load 5"),
        ("[[1,4,2],[4,8,1]]", "[4, 8, 1] must begin at load 5"),
        ("[[1,0,2]]", "[1, 0, 2] must not end before it begins"),
        ("[[1,4,-1]]", "[1, 4, -1] must propose at least 0 tokens"),
        (
            "[[1,4,3]]",
            "speculation_policy proposes 3 tokens at loads 1 to 4; num_speculative_tokens is 2 and must be",
        ),
    ],
)
def test_wrong_lengths_by_load_are_refused_with_one_sentence(value: str, sentence: str) -> None:
    assert sentence in refused(speculation_policy=value)

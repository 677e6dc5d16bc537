"""The coordinator's options: rules, what requests override, and changes while it runs."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.acceptance.strategies import RESIDUAL, checked_strategy
from tandem.config import SpeculativeConfig
from tandem.config.origin import Origin
from tandem.errors import InvalidRequestError
from tandem.model.admin import ConfigOption
from tandem.model.types import GenerationRequest
from tandem_coordinator.requests.plan import requested_options
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.settings.live import LiveConfig
from tests.unit.coordinator.model_infos import INF

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"section_name": "a"}, "section_name is a; it needs config_file, the file that has the section"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be between 1 and 128"),
    ({"num_speculative_tokens": 129}, "num_speculative_tokens is 129; it must be between 1 and 128"),
    ({"typical_delta": -0.1}, "typical_delta is -0.1; it must be at least 0"),
    ({"suffix_decoding_max_spec_factor": INF}, "suffix_decoding_max_spec_factor is inf; it must be a finite number"),
    ({"suffix_decoding_min_token_prob": float("nan")},
        "suffix_decoding_min_token_prob is nan; it must be between 0 and 1"),
    ({"max_model_len": 0}, "max_length is 0; it must be at least 1"),
    ({"device_memory_utilization": 0}, "device_memory_utilization is 0; it must be above 0 and at most 1"),
    ({"rejection_sampling_strategy": "hope"},
        "rejection_sampling_strategy is 'hope'; it must be one of greedy, residual, block, strict, typical-acceptance"),
    ({"speculative_method": "guessing"},
        "speculative_method is 'guessing'; it must be one of standalone, ngram, suffix, eagle, eagle3, medusa, mtp"),
    ({"method": "ngram", "model": "llama"}, "draft_model_path is llama and speculative_method is ngram"),
    ({"draft_devices": "gpu:0,1"}, "draft_devices is 'gpu:0,1'; it must be cpu, cuda, cuda:N, gpu or gpu:N"),
    ({"prompt_lookup_min": 4, "prompt_lookup_max": 2},
        "prompt_lookup_max is 2; it must be at least prompt_lookup_min (4)"),
    ({"draft_load_config": [1]}, "draft_load_config is [1]; it must be an object"),
    ({"max_num_steps": 8}, "max_num_steps is 8; it must be 1"),
    ({"enable_echo": True}, "enable_echo is true; it must be false: the prompt is not streamed back"),
    ({"use_relaxed_acceptance_for_thinking": True, "rejection_sampling_strategy": "strict"},
        "use_relaxed_acceptance_for_thinking is on and the rule is strict; it needs a rule that compares"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "sentence"), BROKEN)
def test_a_configuration_that_breaks_a_rule_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        CoordinatorSettings(target_address="127.0.0.1:1", **options)
    (detail,) = refusal.value.errors()
    assert detail["msg"].startswith(sentence)


CONFIG = SpeculativeConfig(
    num_speculative_tokens=3, rejection_sampling_strategy="strict", typical_epsilon=0.2, relaxed_topk=5
)


def test_a_requests_options_override_the_configuration() -> None:
    request = GenerationRequest("x", num_speculative_tokens=7, rejection_sampling_strategy="block")
    options = requested_options(CONFIG, request)
    assert (options.num_speculative_tokens, options.rejection_sampling_strategy) == (7, "block")
    assert options.typical_epsilon == 0.2


@pytest.mark.parametrize(("named", "rate"), [("strict", None), ("synthetic", 0.5), (None, 0.5)])
def test_configured_rates_hold_for_synthetic_requests_alone(named: str | None, rate: float | None) -> None:
    config = SpeculativeConfig(synthetic_acceptance_rate=0.5)
    request = GenerationRequest("x", rejection_sampling_strategy=named)
    assert requested_options(config, request).synthetic_acceptance_rate == rate


def test_auto_is_checked_as_residual_and_becomes_the_chosen_rule() -> None:
    config = SpeculativeConfig(rejection_sampling_strategy="auto")
    assert checked_strategy(config) is RESIDUAL
    assert requested_options(config, GenerationRequest("x"), "block").rejection_sampling_strategy == "block"
    strict = GenerationRequest("x", rejection_sampling_strategy="strict")
    assert requested_options(config, strict, "block").rejection_sampling_strategy == "strict"
    auto = GenerationRequest("x", rejection_sampling_strategy="AUTO")
    assert requested_options(SpeculativeConfig(), auto, "strict").rejection_sampling_strategy == "strict"


def live(**values: Any) -> LiveConfig:
    return LiveConfig(CoordinatorSettings(target_address="127.0.0.1:1", **values))


def option(config: LiveConfig, name: str) -> ConfigOption:
    return next(option for option in config.options() if option.name == name)


def test_a_change_is_recorded_with_author_and_time(caplog: pytest.LogCaptureFixture) -> None:
    config = live(num_speculative_tokens=3)
    before = config.current
    with caplog.at_level(logging.INFO, "tandem_coordinator.settings.live"):
        (changed,) = config.change({"num-speculative-tokens": "6"}, (), "ipv4:10.0.0.7:1234")
    assert (changed.name, changed.value, changed.origin, changed.changed_by) == (
        *("num_speculative_tokens", 6, Origin.LIVE),
        "ipv4:10.0.0.7:1234",
    )
    assert changed.changed_at is not None
    assert datetime.now(UTC) - changed.changed_at < timedelta(minutes=1)
    assert config.current.num_speculative_tokens == 6
    assert before.num_speculative_tokens == 3, "who holds the old settings keeps them"
    (record,) = caplog.records
    assert record.__dict__ | {"option": changed.name, "value": 6, "before": 3, "by": changed.changed_by} == (
        record.__dict__
    )


def test_a_reset_restores_the_startup_value() -> None:
    config = live(num_speculative_tokens=3)
    config.change({"num_speculative_tokens": "6", "speculation": "false"}, (), "me")
    assert config.current.speculation is False
    (changed,) = config.change({}, ["num_speculative_tokens"], "me")
    assert (changed.value, changed.origin, changed.changed_by) == (3, Origin.DEFAULT, "")
    assert config.current.num_speculative_tokens == 3
    assert config.current.speculation is False


def test_an_option_can_be_unset() -> None:
    config = live(rejection_sampling_strategy="strict")
    config.change({"rejection_sampling_strategy": "null"}, (), "me")
    assert config.current.rejection_sampling_strategy is None
    assert option(config, "rejection_sampling_strategy").origin is Origin.LIVE


def test_options_that_need_each_other_change_together() -> None:
    config = live()
    with pytest.raises(InvalidRequestError, match="needs exactly one of"):
        config.change({"rejection_sampling_strategy": "synthetic"}, (), "me")
    config.change({"rejection_sampling_strategy": "synthetic", "synthetic_acceptance_rate": "0.5"}, (), "me")
    assert config.current.synthetic_acceptance_rate == 0.5
    with pytest.raises(InvalidRequestError, match="it needs the rule synthetic"):
        config.change({"rejection_sampling_strategy": "strict"}, (), "me")
    config.change({}, ["rejection_sampling_strategy", "synthetic_acceptance_rate"], "me")
    assert config.current.rejection_sampling_strategy is None


def test_a_startup_value_in_json_does_not_override_a_change() -> None:
    """The JSON form is read at startup; an option that was changed since is not read from it again."""
    config = live(speculative_config='{"num_speculative_tokens": 5, "relaxed_topk": 3}')
    config.change({"relaxed_topk": "7"}, (), "me")
    assert (config.current.num_speculative_tokens, config.current.relaxed_topk) == (5, 7)
    config.change({"num_speculative_tokens": "null"}, (), "me")
    assert config.current.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"num_speculative_tokens": "x"}, "num_speculative_tokens is 'x'; it must be an integer"),
        ({"rejection_sampling_strategy": "magic"}, "rejection_sampling_strategy is 'magic'"),
        ({"port": "1"}, "port cannot be changed while the coordinator runs"),
        ({"method": "ngram"}, "speculative_method cannot be changed while the coordinator runs"),
        ({"num_speculative_token": "1"}, "did you mean num_speculative_tokens"),
        ({"parallel_drafting": "true"}, "parallel_drafting is not available"),
        ({"num_speculative_tokens": "0", "relaxed_delta": "-1"}, "relaxed_delta is -1"),
    ],
)
def test_an_invalid_change_is_refused_with_the_rules_sentence(values: dict[str, str], sentence: str) -> None:
    config = live()
    before = config.current
    with pytest.raises(InvalidRequestError) as refusal:
        config.change({"relaxed_topk": "5"} | values, (), "me")
    assert sentence in str(refusal.value)
    assert config.current is before, "all of the changes hold, or none"
    assert option(config, "relaxed_topk").origin is Origin.DEFAULT

"""Options that can be changed while the coordinator runs, and options that cannot."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.settings.live import LIVE_OPTIONS, LiveConfig
from tandem.admin import ConfigOption
from tandem.config.layers import Origin
from tandem.errors import InvalidRequestError
from tandem.settings import load_settings


def live(**values: Any) -> LiveConfig:
    return LiveConfig(CoordinatorSettings(target_address="127.0.0.1:1", **values))


def option(config: LiveConfig, name: str) -> ConfigOption:
    return next(option for option in config.options() if option.name == name)


def test_every_option_is_listed_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_RELAXED_TOPK", "4")
    arguments = ["--target-address", "127.0.0.1:1", "--num-speculative-tokens", "5"]
    config = LiveConfig(load_settings(CoordinatorSettings, arguments, "test"))
    assert [option.name for option in config.options()] == list(CoordinatorSettings.model_fields)
    assert option(config, "num_speculative_tokens").origin is Origin.COMMAND_LINE
    assert option(config, "relaxed_topk").origin is Origin.ENVIRONMENT
    assert option(config, "relaxed_delta").origin is Origin.DEFAULT
    assert {option.name for option in config.options() if option.is_live} == set(LIVE_OPTIONS)


def test_a_change_is_recorded_with_author_and_time(caplog: pytest.LogCaptureFixture) -> None:
    config = live(num_speculative_tokens=3)
    before = config.current
    with caplog.at_level(logging.INFO, "coordinator.settings.live"):
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

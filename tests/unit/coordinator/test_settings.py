"""A sentence for each broken rule of the configuration, and how a request overrides it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.settings.acceptance import configured_options, requested_options
from coordinator.settings.coordinator import CheckedSpeculativeConfig
from tandem.config import SpeculativeConfig
from tandem.types import GenerationRequest
from tests.unit.coordinator.model_infos import INF

BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"section_name": "a"}, "section_name is a; it needs config_file, the file that has the section"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be between 1 and 128"),
    ({"num_speculative_tokens": 129}, "num_speculative_tokens is 129; it must be between 1 and 128"),
    ({"typical_delta": -0.1}, "typical_delta is -0.1; it must be at least 0"),
    (
        {"suffix_decoding_max_spec_factor": INF},
        "suffix_decoding_max_spec_factor is inf; it must be a finite number",
    ),
    (
        {"suffix_decoding_min_token_prob": float("nan")},
        "suffix_decoding_min_token_prob is nan; it must be between 0 and 1",
    ),
    ({"max_model_len": 0}, "max_length is 0; it must be at least 1"),
    ({"device_memory_utilization": 0}, "device_memory_utilization is 0; it must be above 0 and at most 1"),
    (
        {"rejection_sampling_strategy": "hope"},
        "rejection_sampling_strategy is 'hope'; it must be one of greedy, residual, block, strict, typical-acceptance, "
        "logit-comparison, synthetic, probabilistic, standard, typical, auto",
    ),
    (
        {"speculative_method": "guessing"},
        "speculative_method is 'guessing'; it must be one of standalone, ngram, suffix, eagle, eagle3, medusa, mtp, "
        "dflash",
    ),
    (
        {"method": "ngram", "model": "llama"},
        "draft_model_path is llama and speculative_method is ngram, which has no model; leave out draft_model_path, "
        "or set speculative_method to standalone",
    ),
    (
        {"draft_devices": "gpu:0,1"},
        "draft_devices is 'gpu:0,1'; it must be cpu, cuda, cuda:N, gpu or gpu:N",
    ),
    (
        {"prompt_lookup_min": 4, "prompt_lookup_max": 2},
        "prompt_lookup_min is 4; it must be at most prompt_lookup_max (2)",
    ),
    (
        {"max_num_steps": 8},
        "max_num_steps is 8; it must be 1: each step of the target verifies a proposal, and its result decides on the "
        "next",
    ),
    (
        {"enable_echo": True},
        "enable_echo is true; it must be false: the prompt is not streamed back; put it before the completion",
    ),
    (
        {"use_relaxed_acceptance_for_thinking": True, "rejection_sampling_strategy": "strict"},
        "use_relaxed_acceptance_for_thinking is on and the rule is strict; it needs a rule that compares probabilities "
        "token by token: residual, typical-acceptance, logit-comparison",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), BROKEN)
def test_a_configuration_that_breaks_a_rule_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        CheckedSpeculativeConfig(**options)
    assert [detail["msg"] for detail in refusal.value.errors()] == [sentence]


CONFIG = SpeculativeConfig(
    num_speculative_tokens=3, rejection_sampling_strategy="strict", typical_epsilon=0.2, relaxed_topk=5
)


def test_a_request_without_options_uses_the_configuration() -> None:
    assert requested_options(CONFIG, GenerationRequest("x")) == configured_options(CONFIG) == CONFIG


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
    assert configured_options(config).rejection_sampling_strategy == "residual"
    assert requested_options(config, GenerationRequest("x"), "block").rejection_sampling_strategy == "block"
    strict = GenerationRequest("x", rejection_sampling_strategy="strict")
    assert requested_options(config, strict, "block").rejection_sampling_strategy == "strict"
    auto = GenerationRequest("x", rejection_sampling_strategy="AUTO")
    assert requested_options(SpeculativeConfig(), auto, "strict").rejection_sampling_strategy == "strict"

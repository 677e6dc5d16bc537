"""Options that a request sets differently from the configuration."""

from __future__ import annotations

import pytest

from coordinator.rejection.options import RejectionOptions
from coordinator.settings.acceptance import configured_options, requested_options
from tandem.config import SpeculativeConfig
from tandem.types import GenerationRequest

CONFIG = SpeculativeConfig(
    num_speculative_tokens=3, rejection_sampling_strategy="strict", typical_epsilon=0.2, relaxed_topk=5
)


def test_a_request_without_options_uses_the_configuration() -> None:
    assert requested_options(CONFIG, GenerationRequest("x")) == configured_options(CONFIG)
    assert configured_options(CONFIG) == RejectionOptions(
        "strict", num_speculative_tokens=3, typical_epsilon=0.2, relaxed_topk=5
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
    assert configured_options(config).rejection_sampling_strategy == "residual"
    assert requested_options(config, GenerationRequest("x"), "block").rejection_sampling_strategy == "block"
    strict = GenerationRequest("x", rejection_sampling_strategy="strict")
    assert requested_options(config, strict, "block").rejection_sampling_strategy == "strict"
    auto = GenerationRequest("x", rejection_sampling_strategy="AUTO")
    assert requested_options(SpeculativeConfig(), auto, "strict").rejection_sampling_strategy == "strict"

"""From the configuration, and what a request says otherwise, to what the acceptance rules are told."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from coordinator.rejection.options import RejectionOptions
from tandem.acceptance_names import canonical_name
from tandem.config import SpeculativeConfig
from tandem.types import GenerationRequest

_SYNTHETIC = "synthetic"


def configured_options(config: SpeculativeConfig) -> RejectionOptions:
    """What the configuration tells the acceptance rules. Both classes have the same names for the same things."""
    values = {field.name: getattr(config, field.name) for field in fields(RejectionOptions)}
    return RejectionOptions(**_given(values))


def requested_options(config: SpeculativeConfig, request: GenerationRequest) -> RejectionOptions:
    """The same, with the request's own wishes.

    A request that names another rule than a synthetic one is not held to the rates that the configuration has for it.
    """
    values = {field.name: getattr(config, field.name) for field in fields(RejectionOptions)}
    named = request.rejection_sampling_strategy
    if named is not None and canonical_name(named) != _SYNTHETIC:
        values = {name: value for name, value in values.items() if not name.startswith(_SYNTHETIC)}
    wishes = {
        "rejection_sampling_strategy": named,
        "num_speculative_tokens": request.num_speculative_tokens,
    }
    return RejectionOptions(**_given(values) | _given(wishes))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

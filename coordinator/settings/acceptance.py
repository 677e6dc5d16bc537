"""Options of the acceptance rules, from the configuration and the request."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from coordinator.rejection.options import RejectionOptions
from tandem.acceptance_names import AUTO, canonical_name
from tandem.config import SpeculativeConfig
from tandem.types import GenerationRequest, ModelInfo

_SYNTHETIC = "synthetic"
_RESIDUAL = "residual"
"""The rule with which the configuration is checked under `auto`: it has the most requirements."""


def configured_options(config: SpeculativeConfig) -> RejectionOptions:
    """Options of the acceptance rules from the configuration. Both classes share their field names."""
    values = {field.name: getattr(config, field.name) for field in fields(RejectionOptions)}
    if names_auto(config):
        values["rejection_sampling_strategy"] = _RESIDUAL
    return RejectionOptions(**_given(values))


def names_auto(config: SpeculativeConfig, request: GenerationRequest | None = None) -> bool:
    """True if measurements should pick the rule."""
    named = None if request is None else request.rejection_sampling_strategy
    named = named or config.rejection_sampling_strategy
    return named is not None and canonical_name(named) == AUTO


def requested_options(
    config: SpeculativeConfig, request: GenerationRequest, auto_rule: str = _RESIDUAL
) -> RejectionOptions:
    """Options of the acceptance rules from the configuration and the request.

    The configuration's synthetic rates do not apply to a request that names another rule.

    Args:
        config: The configuration.
        request: The request.
        auto_rule: The rule that `auto` stands for.
    """
    values = {field.name: getattr(config, field.name) for field in fields(RejectionOptions)}
    named = request.rejection_sampling_strategy
    if named is not None and canonical_name(named) != _SYNTHETIC:
        values = {name: value for name, value in values.items() if not name.startswith(_SYNTHETIC)}
    overrides = {
        "rejection_sampling_strategy": named,
        "num_speculative_tokens": request.num_speculative_tokens,
    }
    options = _given(values) | _given(overrides)
    if names_auto(config, request):
        options["rejection_sampling_strategy"] = auto_rule
    return RejectionOptions(**options)


def for_draft(options: RejectionOptions, draft: ModelInfo | None) -> RejectionOptions:
    """The options with the method of a draft that reads the target's hidden states, which says so itself."""
    if draft is None or not draft.drafting_method:
        return options
    return replace(options, speculative_method=draft.drafting_method)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

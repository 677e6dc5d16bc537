"""Options of the acceptance rules, from the configuration and the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from coordinator.rejection import RejectionOptions, RuleError, Strategy
from coordinator.rejection.resolution import (
    logit_problems,
    named_strategy,
    relaxed_problems,
    synthetic_problems,
)
from tandem.config import SpeculativeConfig
from tandem.config.names import AUTO, canonical_name
from tandem.config.rule import Rule
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


def _combination(
    problems: Callable[[RejectionOptions, Strategy], Iterator[str]],
) -> Callable[[SpeculativeConfig], Iterator[str]]:
    """Conflicts between an acceptance rule and the options; none while the rule itself is unknown."""

    def check(config: SpeculativeConfig) -> Iterator[str]:
        options = configured_options(config)
        try:
            strategy = named_strategy(options)
        except RuleError:
            return
        yield from problems(options, strategy)

    return check


_STRATEGY = "rejection_sampling_strategy"

COMBINATION_RULES: tuple[Rule[SpeculativeConfig], ...] = (
    Rule(
        "relaxed-acceptance",
        "`use_relaxed_acceptance_for_thinking` goes with a rule that compares probabilities token by token.",
        _combination(relaxed_problems),
        (_STRATEGY, "use_relaxed_acceptance_for_thinking"),
    ),
    Rule(
        "synthetic-acceptance",
        "The rule synthetic has exactly one of its three options, in range; other rules have none of them.",
        _combination(synthetic_problems),
        (
            _STRATEGY,
            "num_speculative_tokens",
            "synthetic_acceptance_rate",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
        ),
    ),
    Rule(
        "logit-comparison",
        "The rule logit-comparison goes with a drafting method that has a model.",
        _combination(logit_problems),
        (_STRATEGY, "speculative_method"),
    ),
)
"""The needs of the acceptance rules, beside `SpeculativeConfig.rules()`."""

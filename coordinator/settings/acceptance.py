"""Options of the acceptance rules, from the configuration and the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from coordinator.rejection import RuleError, Strategy
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

_STRATEGY = "rejection_sampling_strategy"
_SYNTHETIC = "synthetic"
_SYNTHETIC_OPTIONS = (
    "synthetic_acceptance_rate",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)
_RESIDUAL = "residual"
"""The rule with which the configuration is checked under `auto`: it has the most requirements."""


def configured_options(config: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration with the rule that stands for `auto`."""
    return config.model_copy(update={_STRATEGY: _RESIDUAL}) if names_auto(config) else config


def names_auto(config: SpeculativeConfig, request: GenerationRequest | None = None) -> bool:
    """True if measurements should pick the rule."""
    named = None if request is None else request.rejection_sampling_strategy
    return canonical_name(named or config.rejection_sampling_strategy or "") == AUTO


def requested_options(
    config: SpeculativeConfig, request: GenerationRequest, auto_rule: str = _RESIDUAL
) -> SpeculativeConfig:
    """The configuration with a request's options, and with the rule that `auto` stands for.

    The configuration's synthetic rates do not apply to a request that names another rule.
    """
    options: dict[str, object] = {}
    if request.num_speculative_tokens is not None:
        options["num_speculative_tokens"] = request.num_speculative_tokens
    if (named := request.rejection_sampling_strategy) is not None:
        options[_STRATEGY] = canonical_name(named)
        if options[_STRATEGY] != _SYNTHETIC:
            options |= dict.fromkeys(_SYNTHETIC_OPTIONS)
    if names_auto(config, request):
        options[_STRATEGY] = auto_rule
    return config.model_copy(update=options) if options else config


def for_draft(options: SpeculativeConfig, draft: ModelInfo | None) -> SpeculativeConfig:
    """The options with the method of a draft that reads the target's hidden states, which says so itself."""
    if draft is None or not draft.drafting_method:
        return options
    return options.model_copy(update={"speculative_method": draft.drafting_method})


def _needs(
    problems: Callable[[SpeculativeConfig, Strategy], Iterator[str]], config: SpeculativeConfig
) -> Iterator[str]:
    """Conflicts between an acceptance rule and the options; none while the rule itself is unknown."""
    options = configured_options(config)
    with suppress(RuleError):
        yield from problems(options, named_strategy(options))


COMBINATION_RULES: tuple[Rule[SpeculativeConfig], ...] = (
    Rule(
        "relaxed-acceptance",
        "`use_relaxed_acceptance_for_thinking` needs a rule that compares probabilities token by token.",
        partial(_needs, relaxed_problems),
        (_STRATEGY, "use_relaxed_acceptance_for_thinking"),
    ),
    Rule(
        "synthetic-acceptance",
        "The rule synthetic has exactly one of its three options, in range; other rules have none of them.",
        partial(_needs, synthetic_problems),
        (_STRATEGY, "num_speculative_tokens", *_SYNTHETIC_OPTIONS),
    ),
    Rule(
        "logit-comparison",
        "The rule logit-comparison needs a drafting method that has a model.",
        partial(_needs, logit_problems),
        (_STRATEGY, "speculative_method"),
    ),
)
"""The needs of the acceptance rules, beside `SpeculativeConfig.rules()`."""

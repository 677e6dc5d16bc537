"""Rules on combinations of options, for the acceptance rules. docs/configuration.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coordinator.rejection.errors import RuleError
from coordinator.rejection.options import RejectionOptions
from coordinator.rejection.resolution import (
    logit_problems,
    named_strategy,
    relaxed_problems,
    synthetic_problems,
)
from coordinator.rejection.strategies import Strategy
from coordinator.settings.acceptance import configured_options
from tandem.config import SpeculativeConfig
from tandem.config.rule import Rule


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

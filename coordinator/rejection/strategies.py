"""The table of acceptance rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.rejection import rules
from coordinator.rejection.block import block
from coordinator.rejection.rounds import Decide
from tandem.config import SpeculativeConfig, names
from tandem.errors import InvalidRequestError
from tandem.types import RowKind

_TOKEN, _SUPPORT, _DENSE = RowKind.TOKEN, RowKind.SUPPORT, RowKind.DENSE


class RuleError(InvalidRequestError):
    """The options conflict. The message is one sentence for a user."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One acceptance rule, and what it needs from draft and target."""

    name: str
    build: Callable[[SpeculativeConfig], Decide]
    """Builds the acceptance function from the options."""
    lossless: bool = True
    """True if the output has the target's distribution; for `greedy`, at temperature 0."""
    row_kinds: tuple[RowKind, ...] = (_SUPPORT, _DENSE)
    """The kinds of target row that the rule accepts, the cheapest first."""
    draft_row_kind: RowKind = _TOKEN
    """Kind of row that the draft sends for each proposed token."""
    needs_draft_support: bool = False
    """True if support rows must contain every token that the draft could have proposed, not only the proposed one."""
    needs_statistics: bool = False
    """True if support rows must come with statistics."""
    needs_token_logits: bool = False
    """True if the draft must send the proposed tokens' logits."""
    reads_argmax: bool = False
    """True if the rule needs only the target's argmax, which a token row holds at temperature 0 alone."""
    can_be_relaxed: bool = False
    """True if relaxed acceptance for thinking can wrap the rule."""
    gains_by_many: bool = False
    """True if deciding the rounds of a message at once is faster than one by one."""


def _synthetic_schedule(options: SpeculativeConfig) -> tuple[float, ...]:
    count = options.num_speculative_tokens
    if options.synthetic_acceptance_rates is not None:
        return rules.schedule_of_rates(options.synthetic_acceptance_rates)
    if options.synthetic_acceptance_length is not None:
        return rules.schedule_of_length(options.synthetic_acceptance_length, count)
    return rules.schedule_of_rate(options.synthetic_acceptance_rate or 0.0, count)


GREEDY = Strategy(
    "greedy",
    lambda options: rules.greedy,
    row_kinds=(_TOKEN, _SUPPORT, _DENSE),
    needs_statistics=True,
    reads_argmax=True,
)
RESIDUAL = Strategy(
    "residual",
    lambda options: rules.residual,
    draft_row_kind=_SUPPORT,
    needs_draft_support=True,
    can_be_relaxed=True,
    gains_by_many=True,
)
BLOCK = Strategy(
    "block", lambda options: block, draft_row_kind=_SUPPORT, needs_draft_support=True, gains_by_many=True
)
STRICT = Strategy("strict", lambda options: rules.strict, row_kinds=(_TOKEN, _DENSE))
TYPICAL_ACCEPTANCE = Strategy(
    "typical-acceptance",
    lambda options: rules.typical(options.typical_epsilon, options.typical_delta),
    lossless=False,
    # Not TOKEN: a proposal drawn with the shared noise would be correlated with the target's sample that replaces
    # it.
    draft_row_kind=_SUPPORT,
    needs_statistics=True,
    can_be_relaxed=True,
)
LOGIT_COMPARISON = Strategy(
    "logit-comparison",
    lambda options: rules.logit_comparison,
    lossless=False,
    needs_statistics=True,
    needs_token_logits=True,
    can_be_relaxed=True,
)
SYNTHETIC = Strategy(
    "synthetic",
    lambda options: rules.synthetic(_synthetic_schedule(options)),
    lossless=False,
    row_kinds=(_TOKEN, _SUPPORT, _DENSE),
    needs_statistics=True,
    reads_argmax=True,
)

STRATEGIES = (
    GREEDY, RESIDUAL, BLOCK, STRICT, TYPICAL_ACCEPTANCE, LOGIT_COMPARISON, SYNTHETIC
)  # fmt: skip
"""All rules."""

_BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


def find_strategy(name: str) -> Strategy:
    """Return the rule of this name in MAX's or vLLM's spelling; underscores and capitals do not matter."""
    try:
        return _BY_NAME[names.canonical_name(name)]
    except KeyError:
        raise RuleError(
            f"rejection_sampling_strategy is {name!r}; it must be one of {', '.join(names.SPELLINGS)}"
        ) from None

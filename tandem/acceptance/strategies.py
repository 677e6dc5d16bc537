"""The table of acceptance rules, and how options and sampling parameters resolve to one, or to what conflicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from tandem.acceptance import rules
from tandem.acceptance.block import block
from tandem.acceptance.rounds import KEYED, Decide, MessageVerification, Noise, Round
from tandem.config import SpeculativeConfig, names
from tandem.config.rule import Rule, broken, rule
from tandem.errors import InvalidRequestError
from tandem.model.types import (
    NO_LEAD,
    Acceptance,
    AcceptanceTerms,
    Delta,
    IntArray,
    Lead,
    ModelInfo,
    Proposal,
    RowKind,
    SamplingParams,
    VerifyStep,
)

_TOKEN = RowKind.TOKEN
_SUPPORT = RowKind.SUPPORT
_DENSE = RowKind.DENSE


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
)
BLOCK = Strategy("block", lambda options: block, draft_row_kind=_SUPPORT, needs_draft_support=True)
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


LOSSLESS_RULES = (*(strategy.name for strategy in STRATEGIES if strategy.lossless), names.AUTO)
"""Names of the rules under which no draft changes the text's distribution, with the one that picks among them."""


def find_strategy(name: str) -> Strategy:
    """Return the rule of this name in MAX's or vLLM's spelling; underscores and capitals do not matter."""
    canonical_name = names.canonical_name(name)
    for strategy in STRATEGIES:
        if strategy.name == canonical_name:
            return strategy
    raise InvalidRequestError(
        f"rejection_sampling_strategy is {name!r}; it must be one of {', '.join(names.SPELLINGS)}"
    )


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """An acceptance rule, configured for one request's options and sampling parameters, which may change what its
    strategy says of losslessness, row kinds and statistics."""

    strategy: Strategy
    lossless: bool
    row_kinds: tuple[RowKind, ...]
    needs_statistics: bool
    decide: Decide
    terms: AcceptanceTerms
    """The rule as a target is told of it."""
    is_relaxed: bool = False
    """True if think spans change the rule."""

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def decide_many(self) -> Decide | None:
        """Decides the rounds of a message at once; None where that gains nothing, since the rule does not compute with
        whole supports, and where think spans matter."""
        return self.decide if self.strategy.needs_draft_support and not self.is_relaxed else None

    def row_kind(self, requested: RowKind | None = None) -> RowKind:
        """Return the requested kind of target row, if the rule accepts it, or the cheapest one that it accepts."""
        if requested is None:
            return self.row_kinds[0]
        if requested not in self.row_kinds:
            allowed = " or ".join(kind.value for kind in self.row_kinds)
            raise InvalidRequestError(f"row_kind is {requested.value}; {self.name} needs {allowed} rows here")
        return requested

    def step(
        self, delta: Delta, proposal: Proposal, kind: RowKind, serial: int = 0, lead: Lead = NO_LEAD
    ) -> VerifyStep:
        """The step that asks a target for rows of this kind, from which the rule decides on the proposal.

        With nothing proposed, a support row would hold only a sample of the target, which a token row holds too.
        """
        if kind is RowKind.SUPPORT and not (proposal.token_ids or self.needs_statistics):
            kind = RowKind.TOKEN
        return VerifyStep(
            delta=delta,
            row_kind=kind,
            row_count=len(proposal.token_ids) + 1,
            supports=self.supports(proposal) if kind is RowKind.SUPPORT else (),
            with_statistics=self.needs_statistics,
            lead=lead.credits if kind is RowKind.TOKEN else 0,
            min_proposed=lead.min_proposed,
            alone_after_miss=lead.alone_after_miss,
            serial=serial,
        )

    def own_step(self, delta: Delta, kind: RowKind, serial: int, lead: int, tokens: int) -> VerifyStep:
        """The step that has the target's own head propose up to so many tokens, and asks for rows of this kind."""
        return VerifyStep(
            delta=delta,
            row_kind=kind,
            row_count=1,
            with_statistics=self.needs_statistics,
            lead=lead if self.may_lead and kind is not _DENSE else 0,
            serial=serial,
            own_tokens=tokens,
        )

    def step_with(self, step: VerifyStep, proposal: Proposal) -> VerifyStep:
        """The step with what the target's own head proposes, from which the rule decides on it."""
        kind = step.row_kind
        if kind is RowKind.SUPPORT and not (proposal.token_ids or step.with_statistics):
            kind = RowKind.TOKEN
        return VerifyStep(
            delta=Delta(step.delta.base_length, (*step.delta.token_ids, *proposal.token_ids)),
            row_kind=kind,
            row_count=len(proposal.token_ids) + 1,
            supports=self.supports(proposal) if kind is RowKind.SUPPORT else (),
            with_statistics=step.with_statistics,
            lead=step.lead,
            serial=step.serial,
            own_tokens=step.own_tokens,
        )

    @property
    def may_lead(self) -> bool:
        """True if a target that knows the rule decides as it does, and what it decides ends with a token."""
        return not self.is_relaxed and self.strategy not in (LOGIT_COMPARISON, SYNTHETIC)

    def supports(self, proposal: Proposal) -> tuple[IntArray, ...]:
        """Return the supports to request from the target, one for each proposed token."""
        if not (self.strategy.needs_draft_support and proposal.distributions):
            return tuple(np.array([token_id]) for token_id in proposal.token_ids)
        return tuple(each.token_ids for each in proposal.distributions)

    def accept(self, own: Round, noise: Noise = KEYED) -> Acceptance:
        """Decide which part of a proposal is kept, and which token follows it.

        The proposal has distributions or logits where the rule needs them, and the K + 1 rows of the target are of one
        of `row_kinds`. If they came in a message with others, all of those are decided at once.
        """
        if isinstance(own.verification, MessageVerification):
            return own.verification.acceptance(self.decide)
        return self.decide([own], noise)[0]


def resolve(options: SpeculativeConfig, sampling: SamplingParams) -> AcceptanceRule:
    """Return the rule for a request.

    At temperature 0 the rule is `greedy` whatever the options name, except for `synthetic`, which measures
    something else. The target's distribution is then one-hot, so relaxed acceptance could not keep more.
    Without a name the rule is `residual` for a standalone draft model, n-gram and suffix drafting, and
    `typical-acceptance` for eagle and mtp. Options that conflict are refused with a sentence for each reason.
    """
    strategy = find_strategy(options.acceptance_rule)
    if conflicts := broken(COMBINATION_RULES, options):
        raise InvalidRequestError("; ".join(conflicts))
    if sampling.is_greedy and strategy is not SYNTHETIC:
        strategy = GREEDY
    reads_sample = strategy.reads_argmax and not sampling.is_greedy  # a token row holds no argmax then
    is_relaxed = options.use_relaxed_acceptance_for_thinking and not sampling.is_greedy
    decide = strategy.build(options)
    if is_relaxed:
        assert isinstance(decide, rules.TokenRule), "rules that can be relaxed decide token by token"
        decide = rules.relax(decide, options.relaxed_topk, options.relaxed_delta)
    return AcceptanceRule(
        strategy=strategy,
        lossless=strategy.lossless and not is_relaxed and not reads_sample,
        row_kinds=tuple(kind for kind in strategy.row_kinds if not (reads_sample and kind is RowKind.TOKEN)),
        needs_statistics=strategy.needs_statistics or is_relaxed,
        decide=decide,
        terms=AcceptanceTerms(strategy.name, options.typical_epsilon, options.typical_delta),
        is_relaxed=is_relaxed,
    )


def rule_of(terms: AcceptanceTerms, sampling: SamplingParams) -> AcceptanceRule:
    """The rule that a coordinator names, for a target that proposes for it. Nobody asks it to decide by the rule
    synthetic, so that has any rate here.

    Raises:
        InvalidRequestError: There is no such rule.
    """
    return _rule_of(terms, sampling.is_greedy)


@lru_cache(64)
def _rule_of(terms: AcceptanceTerms, is_greedy: bool) -> AcceptanceRule:
    strategy = find_strategy(terms.name)
    options = SpeculativeConfig(
        rejection_sampling_strategy=strategy.name,
        typical_epsilon=terms.epsilon,
        typical_delta=terms.delta,
        synthetic_acceptance_rate=0.0 if strategy is SYNTHETIC else None,
    )
    return resolve(options, SamplingParams(temperature=0.0 if is_greedy else 1.0))


def checked_strategy(options: SpeculativeConfig) -> Strategy | None:
    """The rule with which options are checked: under `auto` the one that has the most requirements. None where they
    name an unknown rule."""
    if names.canonical_name(options.acceptance_rule) == names.AUTO:
        return RESIDUAL
    try:
        return find_strategy(options.acceptance_rule)
    except InvalidRequestError:
        return None


def for_draft(options: SpeculativeConfig, draft: ModelInfo | None) -> SpeculativeConfig:
    """The options with the method of a draft that reads the target's hidden states, which says so itself."""
    if draft is None or not draft.drafting_method:
        return options
    return options.model_copy(update={"speculative_method": draft.drafting_method})


SYNTHETIC_OPTIONS = ("synthetic_acceptance_rate", "synthetic_acceptance_rates", "synthetic_acceptance_length")


@rule("`use_relaxed_acceptance_for_thinking` needs a rule that compares probabilities token by token.")
def _relaxed_acceptance(options: SpeculativeConfig) -> Iterator[str]:
    strategy = checked_strategy(options)
    if strategy and options.use_relaxed_acceptance_for_thinking and not strategy.can_be_relaxed:
        partners = ", ".join(other.name for other in STRATEGIES if other.can_be_relaxed)
        yield (
            f"use_relaxed_acceptance_for_thinking is on and the rule is {strategy.name}; "
            f"it needs a rule that compares probabilities token by token: {partners}"
        )


@rule("The rule synthetic has exactly one of its three options, in range; other rules have none of them.")
def _synthetic_acceptance(options: SpeculativeConfig) -> Iterator[str]:
    if (strategy := checked_strategy(options)) is None:
        return
    given = [name for name in SYNTHETIC_OPTIONS if getattr(options, name) is not None]
    if strategy is not SYNTHETIC:
        for name in given:
            yield f"{name} is set and the rule is {strategy.name}; it needs the rule synthetic"
    elif len(given) != 1:
        yield (
            f"the rule synthetic needs exactly one of {', '.join(SYNTHETIC_OPTIONS)}; "
            f"{' and '.join(given) or 'none'} of them is set"
        )
    count = options.num_speculative_tokens
    rates = options.synthetic_acceptance_rates
    length = options.synthetic_acceptance_length
    if rates is not None:
        yield from _rate_problems(rates, count)
    if length is not None and not 1.0 <= length <= count + 1:
        yield f"synthetic_acceptance_length is {length}; it must be between 1 and {count + 1}"


def _rate_problems(rates: Sequence[float], count: int) -> Iterator[str]:
    if len(rates) != count:
        yield f"synthetic_acceptance_rates has {len(rates)} entries; it must have {count}, one for each token"
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        yield f"synthetic_acceptance_rates is {list(rates)}; each rate must be between 0 and 1"
    if not all(later <= earlier for earlier, later in pairwise(rates)):
        yield f"synthetic_acceptance_rates is {list(rates)}; no rate may be higher than the one before it"


@rule("The rule logit-comparison needs a drafting method that has a model.")
def _logit_comparison(options: SpeculativeConfig) -> Iterator[str]:
    if checked_strategy(options) is LOGIT_COMPARISON and options.speculative_method in ("ngram", "suffix"):
        yield (
            f"the rule is logit-comparison and speculative_method is {options.speculative_method}; "
            "it needs a draft that has logits"
        )


COMBINATION_RULES: tuple[Rule[SpeculativeConfig], ...] = (
    _relaxed_acceptance,
    _synthetic_acceptance,
    _logit_comparison,
)
"""The needs of the acceptance rules, beside `SpeculativeConfig.rules()`."""

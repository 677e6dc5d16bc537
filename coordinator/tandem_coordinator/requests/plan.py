"""From a request to what will be done for it: checked, with every default filled in."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

from tokenizers import Tokenizer

from tandem.acceptance.rounds import Round
from tandem.acceptance.strategies import SYNTHETIC_OPTIONS, AcceptanceRule, find_strategy, for_draft, resolve
from tandem.config import SpeculativeConfig
from tandem.config.names import AUTO, AUTO_NAMES, canonical_name
from tandem.config.rule import refuse
from tandem.config.speculative import SpeculationPolicy
from tandem.model.grammar import GrammarState
from tandem.model.sampling.defaults import DEFAULT_NAMES
from tandem.model.types import (
    MIN_TEMPERATURE,
    Acceptance,
    AheadBudget,
    DraftOptions,
    FeatureRequest,
    GenerationRequest,
    LogitAdjustments,
    ModelInfo,
    Proposal,
    RowKind,
    SamplingDefaults,
    SamplingParams,
    TargetOptions,
    TruncationSide,
    Verification,
    VocabularyMapping,
)
from tandem.serving.scopes import RequestScopes
from tandem_coordinator.controller import DraftAhead
from tandem_coordinator.decoding.completion import (
    Completion,
    Detokenizer,
    Limits,
    StopStrings,
    ThinkSpans,
    think_spans,
)
from tandem_coordinator.decoding.tokenization import PromptEncoder
from tandem_coordinator.requests import validation
from tandem_coordinator.requests.grammars import CheckedGrammars
from tandem_coordinator.rounds.session import SessionPolicy
from tandem_coordinator.settings.coordinator import CoordinatorSettings, RequestBounds
from tandem_coordinator.telemetry.observer import EventValue

_SYNTHETIC = "synthetic"

MAX_FORCED_TOKENS = 16
"""Most tokens that are proposed because the grammar leaves no choice: the names of JSON's members are shorter."""

_SAMPLING = tuple(each.name for each in fields(SamplingParams))

_INDEPENDENT_OF_DRAFT = frozenset({"greedy", "strict"})
"""Rules whose text is a function of the seed and the target alone."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models that complete a request."""

    target: ModelInfo
    draft: ModelInfo | None
    """None when the target works alone. A draft that is away for a while still counts in the checks of requests."""
    encoder: PromptEncoder
    grammars: CheckedGrammars | None = None
    """Compiles what completions may be; None where completions may be anything only."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Hold where a request names no value."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer

    @property
    def draft_name(self) -> str:
        """Name of the draft's model; empty without one."""
        return "" if self.draft is None else self.draft.name

    @property
    def max_text_bytes(self) -> int | None:
        """Bytes beyond which any prompt has more than `max_length` tokens; None where there is no such bound."""
        per_token = self.encoder.max_bytes_per_token
        return None if per_token is None else per_token * self.target.max_length

    def with_defaults(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the sampling defaults filled in, and greedy where its temperature is too low to compute."""
        defaults = self.sampling_defaults
        names = [name for name in DEFAULT_NAMES if name in _SAMPLING and getattr(request, name) is None]
        values = {name: getattr(defaults, name) for name in names}
        filled = replace(request, **values)
        if filled.temperature is not None and 0.0 < filled.temperature < MIN_TEMPERATURE:
            filled = replace(filled, temperature=0.0)
        if (limit := defaults.max_new_tokens) is not None:
            asked = limit if request.max_tokens is None else request.max_tokens
            filled = replace(filled, max_tokens=min(asked, limit))
        return filled

    async def encode(
        self, text: str, bounds: RequestBounds, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        refuse(validation.too_much_text(text, bounds, self.max_text_bytes))
        return await self.encoder.encode(text, add_special_tokens=add_special_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was checked, with every default filled in."""

    request_id: str
    request: GenerationRequest
    prompt: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    rule: AcceptanceRule
    row_kind: RowKind
    num_speculative_tokens: int
    """0: the target alone."""
    draft_ahead: DraftAhead
    keeps_proposals: bool
    """True if a seed promises its text and that depends on what is proposed, which must then not depend on time."""
    policy: SpeculationPolicy
    """How much its rounds propose."""
    kept_out_by: tuple[str, ...]
    """Fields of the request because of which the target serves it alone."""
    think_spans: ThinkSpans | None
    """Followed when acceptance is relaxed inside them."""
    grammar: GrammarState | None
    """The grammar of the completion, before its first token; None for any text."""
    forbidden_sequences: tuple[tuple[int, ...], ...]
    """Sequences of token ids that the completion does not hold."""
    scopes: RequestScopes
    settings: CoordinatorSettings
    models: Models

    @property
    def details(self) -> dict[str, EventValue]:
        """Attributes of its span; those named gen_ai. follow OpenTelemetry's conventions for generative AI."""
        top_k = self.request.top_k
        given = {"top_p": self.request.top_p, "top_k": None if top_k is None else float(top_k)}
        return {
            "gen_ai.request.model": self.models.target.name,
            "gen_ai.response.model": self.models.target.name,
            "gen_ai.request.max_tokens": self.limits.max_tokens,
            "gen_ai.request.temperature": self.sampling.temperature,
            "gen_ai.request.seed": self.sampling.seed,
            "gen_ai.usage.input_tokens": len(self.prompt),
            "tandem.rule": self.rule.name,
            "tandem.num_speculative_tokens": self.num_speculative_tokens,
            **{f"gen_ai.request.{name}": value for name, value in given.items() if value is not None},
        }

    @property
    def asks_head(self) -> bool:
        """True if a target's own head proposes."""
        draft = self.models.draft
        return self.num_speculative_tokens > 0 and draft is not None and bool(draft.drafting_method)

    @property
    def lead(self) -> int:
        """Number of rounds that the target may begin by itself: it must decide as the rule does."""
        may_lead = self.rule.lossless
        if self.asks_head:
            # Dense rows take megabytes, which nobody may want.
            may_lead = self.rule.may_lead and self.row_kind is not RowKind.DENSE
        return self.settings.target_lead if may_lead else 0

    @property
    def can_lead_with_proposals(self) -> bool:
        """True if the target decides rounds with a proposal as the rule does: by its own token at each position."""
        return self.rule.lossless and self.row_kind is RowKind.TOKEN

    @property
    def session_policy(self) -> SessionPolicy:
        return SessionPolicy(
            self.lead, self.can_lead_with_proposals, self.keeps_proposals, asks_head=self.asks_head
        )

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.limits.max_tokens

    @property
    def shows_prompt(self) -> bool:
        """True if the first chunk is about the prompt."""
        request = self.request
        return request.echo or (request.prompt_logprobs is not None and not request.delivered_token_ids)

    @property
    def _row_logprobs(self) -> int | None:
        """Number of tokens that each row gives log probabilities of; the most probable one is needed by rules."""
        count = self.request.logprobs
        return None if count is None or self.row_kind is RowKind.DENSE else max(count, 1)

    def scoring_options(self, client: str = "") -> TargetOptions:
        """Options of a sequence whose rows score the prompt, which nothing changes that is for the completion."""
        return replace(
            self.target_options(client),
            sampling=SamplingParams(),
            adjustments=LogitAdjustments(),
            grammar=None,
            acceptance=None,
            draft_top_k=0,
            logprobs=None,
            sampled_logprobs=False,
            features=None,
        )

    def target_options(self, client: str = "") -> TargetOptions:
        """Options with which its sequence opens on a target, with the client's address."""
        request = self.request
        return TargetOptions(
            request_id=self.request_id,
            sampling=self.sampling,
            max_length=self.max_length,
            prompt_length=len(self.prompt),
            adjustments=validation.adjustments_of(request, self.models.target, self.forbidden_sequences),
            client=client,
            scope=self.scopes.prefix,
            end_token_ids=tuple(sorted({*self.limits.eos_token_ids, *self.limits.stop_token_ids})),
            grammar=None if self.grammar is None else self.grammar.grammar,
            acceptance=self.rule.terms if self.asks_head else None,
            draft_top_k=(self.settings.draft_top_k or 0) if self.asks_head else 0,
            logprobs=self._row_logprobs,
            sampled_logprobs=request.sampled_logprobs,
            features=self._features,
        )

    @property
    def _features(self) -> FeatureRequest | None:
        """The hidden states that the draft reads; None for a draft that reads none."""
        draft = self.models.draft
        if draft is None or not draft.features_head or not self.num_speculative_tokens:
            return None
        return FeatureRequest(draft.features_head, draft.feature_window)

    def draft_options(self, ahead: AheadBudget | None = None, client: str = "") -> DraftOptions:
        """Options with which it opens on a draft, with the most that it may draft ahead and the client's address."""
        strategy = self.rule.strategy
        mapping = self.settings.vocabulary_mapping
        return DraftOptions(
            request_id=self.request_id,
            sampling=self.sampling,
            max_length=self.max_length,
            row_kind=strategy.draft_row_kind,
            draft_top_k=self.settings.draft_top_k,
            with_token_logits=strategy.needs_token_logits,
            ahead=ahead,
            client=client,
            prompt_length=len(self.prompt),
            grammar=None if self.grammar is None else self.grammar.grammar,
            tokenizer_hash=self.models.target.tokenizer_hash,
            vocabulary_mapping=VocabularyMapping(mapping) if mapping != "off" else VocabularyMapping.AUTO,
            vocabulary_size=self.models.target.vocabulary_size,
        )

    def begin(self) -> Completion:
        """The completion, which holds only the prompt, and what an earlier stream has delivered."""
        completion = Completion(
            self.prompt,
            self.limits,
            Detokenizer(self.models.tokenizer, skip_special_tokens=not self.request.with_special_tokens),
            StopStrings(self.request.stop, included=self.request.include_stop_str_in_output),
            self.request_id,
            self.sampling.seed,
            self.grammar,
            0 if self.rule.strategy.needs_token_logits else MAX_FORCED_TOKENS,
        )
        completion.go_on_after(self.request.delivered_token_ids)
        return completion

    def accept(self, completion: Completion, proposal: Proposal, verification: Verification) -> Acceptance:
        spans = self.think_spans
        thinking = () if spans is None else spans.inside(completion.token_ids, proposal.token_ids)
        return self.rule.accept(Round(proposal, verification, self.sampling, thinking))


ChooseRule = Callable[[Sequence[str], float], str]
"""Picks one of the named rules for a temperature, from measurements."""


async def make_plan(
    request: GenerationRequest,
    request_id: str,
    settings: CoordinatorSettings,
    models: Models,
    scopes: RequestScopes,
    choose_rule: ChooseRule = lambda names, temperature: names[0],
) -> Plan:
    """Check a request that is within its bounds, and decide how it is completed."""
    request = models.with_defaults(request)
    kept_out_by = keep_out(request, settings, models) if settings.speculation else ()
    if not settings.speculation or kept_out_by or (request.echo and validation.never_proposes(request)):
        request = replace(request, speculation=False)
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = await models.encoder.encode(prompt)
    prompt = truncate(prompt, request, models.target)
    forbidden: tuple[tuple[int, ...], ...] = ()
    if request.bad_words:
        forbidden = await models.encoder.encode_words(request.bad_words, models.target.vocabulary_size)
    options = requested_options(settings, request, _auto_rule(settings, request, choose_rule))
    options = for_draft(options, models.draft)
    validation.TokenizedRequest(
        request,
        prompt,
        models.target,
        models.draft,
        options,
        settings.draft_model_penalties,
        forbidden,
        echo_without_draft=settings.compatibility == "max",
    ).check()
    grammar = None
    if request.grammar is not None:
        assert models.grammars is not None, "structured output needs a compiler of grammars"
        spans = think_spans(models.tokenizer)
        whole = request.grammar if spans is None else spans.before(request.grammar, prompt)
        grammar = await models.grammars.open(whole, scopes.prefix)
    sampling = _sampling(request)
    room = models.target.max_length - len(prompt)
    speculates = request.speculation and models.draft is not None
    rule = resolve(options, sampling)
    # Where rounds begin, and so how much each proposes, must not change what a seed promises.
    promises_text = rule.name == _SYNTHETIC or (
        request.seed is not None and rule.name not in _INDEPENDENT_OF_DRAFT
    )
    # Synthetic acceptance exists to measure rounds with a draft.
    policy = "fixed" if rule.name == _SYNTHETIC else settings.speculation_policy
    return Plan(
        request_id=request_id,
        request=request,
        prompt=prompt,
        sampling=sampling,
        limits=Limits(
            max_length=models.target.max_length,
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            eos_token_ids=() if request.ignore_eos else frozenset(models.target.eos_token_ids),
            stop_token_ids=frozenset(request.stop_token_ids),
            min_tokens=request.min_tokens,
        ),
        rule=rule,
        row_kind=_row_kind(rule, request),
        num_speculative_tokens=options.num_speculative_tokens if speculates else 0,
        draft_ahead=settings.draft_ahead if can_draft_ahead(rule, models.draft) else "off",
        keeps_proposals=policy == "fixed" and promises_text,
        policy=policy,
        kept_out_by=kept_out_by,
        think_spans=think_spans(models.tokenizer) if options.use_relaxed_acceptance_for_thinking else None,
        grammar=grammar,
        forbidden_sequences=forbidden,
        scopes=scopes,
        settings=settings,
        models=models,
    )


def _row_kind(rule: AcceptanceRule, request: GenerationRequest) -> RowKind:
    """The kind of the target's rows: as requested, or the cheapest one that says all that is asked for."""
    kind = rule.row_kind(request.row_kind)
    wants_logprobs = request.logprobs is not None or request.sampled_logprobs
    if kind is RowKind.TOKEN and rule.name == _SYNTHETIC and wants_logprobs:
        # It keeps proposed tokens that the target would not choose, and a row of one token knows nothing of them.
        return RowKind.SUPPORT
    return kind


def truncate(prompt: tuple[int, ...], request: GenerationRequest, target: ModelInfo) -> tuple[int, ...]:
    """The prompt, shortened as the request says."""
    count = request.truncate_prompt_tokens
    if count == -1:
        count = target.max_length - 1
    if count is None or not 0 < count < len(prompt):
        return prompt
    return prompt[:count] if request.truncation_side is TruncationSide.RIGHT else prompt[-count:]


def keep_out(request: GenerationRequest, bounds: RequestBounds, models: Models) -> tuple[str, ...]:
    """Names of the request's penalties because of which the target serves it alone, as configured. None where no draft
    would propose in any case."""
    if models.draft is None or not request.speculation:
        return ()
    is_alone = validation.is_separate_model(models.draft) and bounds.draft_model_penalties == "target-only"
    return validation.penalties_of(models.with_defaults(request)) if is_alone else ()


def _sampling(request: GenerationRequest) -> SamplingParams:
    """The request's sampling parameters, with a random seed if it has none."""
    given = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    return SamplingParams(**{"seed": secrets.randbits(63), **given})


# ---- options of the acceptance rule


def names_auto(config: SpeculativeConfig, request: GenerationRequest | None = None) -> bool:
    """True if measurements should pick the rule."""
    named = None if request is None else request.rejection_sampling_strategy
    return canonical_name(named or config.rejection_sampling_strategy or "") == AUTO


def requested_options(
    config: SpeculativeConfig, request: GenerationRequest, auto_rule: str = "residual"
) -> SpeculativeConfig:
    """The configuration with a request's options, and with the rule that `auto` stands for. Its synthetic rates do not
    apply to a request that names another rule."""
    options: dict[str, object] = {}
    if request.num_speculative_tokens is not None:
        options["num_speculative_tokens"] = request.num_speculative_tokens
    if (named := request.rejection_sampling_strategy) is not None:
        options["rejection_sampling_strategy"] = rule = canonical_name(named)
        if rule != _SYNTHETIC:
            options |= dict.fromkeys(SYNTHETIC_OPTIONS)
    if names_auto(config, request):
        options["rejection_sampling_strategy"] = auto_rule
    return config.model_copy(update=options) if options else config


def _auto_rule(settings: CoordinatorSettings, request: GenerationRequest, choose_rule: ChooseRule) -> str:
    """Resolve `auto` for this request. A seed gets `strict`: its text must not depend on measurements."""
    if not names_auto(settings, request) or settings.use_relaxed_acceptance_for_thinking:
        return "residual"
    names = [
        name
        for name in AUTO_NAMES
        if request.row_kind is None or request.row_kind in find_strategy(name).row_kinds
    ]
    if request.seed is not None and "strict" in names:
        return "strict"
    temperature = SamplingParams().temperature if request.temperature is None else request.temperature
    return choose_rule(names or ["residual"], temperature)


def can_draft_ahead(rule: AcceptanceRule, draft: ModelInfo | None) -> bool:
    """True if the draft has a model, and can tell which outcomes are likely. One that is bound to its target needs what
    the verification computes."""
    if draft is None or not draft.has_model or draft.drafting_method:
        return False
    strategy = rule.strategy
    return strategy.draft_row_kind in (RowKind.TOKEN, RowKind.SUPPORT) and not strategy.needs_token_logits

"""From a request to what will be done for it: checked, with every default filled in."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from coordinator.acceptance import requested_options
from coordinator.completion import Completion, Limits
from coordinator.observer import EventValue
from coordinator.rejection.errors import RowError, RuleError
from coordinator.rejection.options import RejectionOptions
from coordinator.rejection.resolution import AcceptanceRule, resolve
from coordinator.rejection.uniforms import NO_UNIFORMS, draw_uniforms
from coordinator.requests import ActiveRequest
from coordinator.rules import TokenizedRequest, check_request
from coordinator.settings import CoordinatorSettings
from coordinator.text import Detokenizer, StopStrings
from coordinator.thinking import ThinkSpans, think_spans
from coordinator.tokenizer import encode
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    Acceptance,
    GenerationRequest,
    ModelInfo,
    Proposal,
    RowKind,
    SamplingParams,
    Verification,
)

_SYNTHETIC = "synthetic"

_INDEPENDENT_OF_DRAFT = frozenset({"greedy", "strict"})
"""Rules whose text is a function of the seed and the target alone."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models that are to complete a request."""

    target: ModelInfo
    draft: ModelInfo | None
    """None when the target works alone."""
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was checked, with every default filled in."""

    request_id: str
    request: GenerationRequest
    prompt: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    rule: AcceptanceRule
    num_speculative_tokens: int
    """0: the target alone."""
    draft_top_k: int
    draft_patience_seconds: float | None
    may_pause_draft: bool
    target_wait_seconds: float
    think_spans: ThinkSpans | None
    """Followed when acceptance is relaxed inside them."""
    model_name: str
    """The target's."""

    @property
    def details(self) -> dict[str, EventValue]:
        """What an observer may want to know of it."""
        asked = {"top_p": self.request.top_p, "top_k": self.request.top_k}
        return {
            "model": self.model_name,
            "rule": self.rule.name,
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_tokens": len(self.prompt),
            "max_tokens": self.limits.max_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            **{name: value for name, value in asked.items() if value is not None},
        }

    def begin(self, tokenizer: Tokenizer) -> Completion:
        """The completion, with nothing but the prompt yet."""
        return Completion(
            self.prompt,
            self.limits,
            Detokenizer(tokenizer),
            StopStrings(self.request.stop),
            request_id=self.request_id,
            seed=self.sampling.seed,
        )

    def active(self, completion: Completion) -> ActiveRequest:
        """Its entry in the list of those that run."""
        return ActiveRequest(
            self.request_id, completion, len(self.prompt), self.rule.name, self.num_speculative_tokens
        )

    def accept(self, completion: Completion, proposal: Proposal, verification: Verification) -> Acceptance:
        """The acceptance rule with this round's random numbers.

        Raises:
            ProtocolError: what draft and target told does not go together.
        """
        uniforms = NO_UNIFORMS
        if self.rule.strategy.draws:
            uniforms = draw_uniforms(self.sampling.seed, proposal.base_length, len(proposal))
        spans = self.think_spans
        thinking = () if spans is None else spans.inside(completion.token_ids, proposal.token_ids)
        try:
            return self.rule.accept(proposal, verification, self.sampling, uniforms, thinking)
        except RowError as error:
            raise ProtocolError(str(error)) from error


async def make_plan(
    request: GenerationRequest, request_id: str, settings: CoordinatorSettings, models: Models
) -> Plan:
    """Check a request, which keeps its bounds, and decide how it is completed.

    Raises:
        InvalidRequestError: with a sentence for each rule that it breaks.
    """
    if not settings.speculation:
        request = replace(request, speculation=False)
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = await encode(models.tokenizer, prompt)
    options = requested_options(settings, request)
    check_request(TokenizedRequest(request, prompt, models.target, models.draft, options))
    if request.logprobs is not None:
        request = replace(request, row_kind=RowKind.DENSE)
    sampling = _sampling(request)
    speculates = request.speculation and models.draft is not None
    rule = _rule(options, sampling, request)
    return Plan(
        request_id=request_id,
        request=request,
        prompt=prompt,
        sampling=sampling,
        limits=_limits(request, len(prompt), models.target),
        rule=rule,
        num_speculative_tokens=options.num_speculative_tokens if speculates else 0,
        draft_top_k=settings.draft_top_k,
        draft_patience_seconds=settings.draft_patience_seconds,
        may_pause_draft=settings.draft_pause and _may_pause(rule, request),
        target_wait_seconds=settings.target_wait_seconds,
        think_spans=(think_spans(models.tokenizer) if options.use_relaxed_acceptance_for_thinking else None),
        model_name=models.target.name,
    )


def _limits(request: GenerationRequest, prompt_length: int, target: ModelInfo) -> Limits:
    room = target.max_length - prompt_length
    return Limits(
        max_length=target.max_length,
        max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
        eos_token_ids=() if request.ignore_eos else frozenset(target.eos_token_ids),
    )


def _sampling(request: GenerationRequest) -> SamplingParams:
    """The request's sampling parameters, and a seed drawn for it when it brings none."""
    defaults = SamplingParams()
    return SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_k=defaults.top_k if request.top_k is None else request.top_k,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        repetition_penalty=request.repetition_penalty or defaults.repetition_penalty,
        frequency_penalty=request.frequency_penalty or defaults.frequency_penalty,
        presence_penalty=request.presence_penalty or defaults.presence_penalty,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
    )


def _rule(options: RejectionOptions, sampling: SamplingParams, request: GenerationRequest) -> AcceptanceRule:
    try:
        rule = resolve(options, sampling)
        rule.row_kind(request.row_kind)
    except RuleError as error:
        raise InvalidRequestError(str(error)) from None
    return rule


def _may_pause(rule: AcceptanceRule, request: GenerationRequest) -> bool:
    """Whether rounds without a draft may be mixed in because of what was measured.

    Times differ from run to run. Where the text depends on where rounds begin, a seed would then promise nothing; and
    synthetic acceptance is there to measure rounds with a draft.
    """
    if rule.name == _SYNTHETIC:
        return False
    return request.seed is None or rule.name in _INDEPENDENT_OF_DRAFT

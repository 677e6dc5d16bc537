"""From a request to its stream of chunks: check it, open its streams, run its rounds, close them."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer

from coordinator.acceptance import requested_options
from coordinator.completion import Completion, Limits
from coordinator.draft_client import DraftClient, DraftLimits, DraftSequence, NoDrafter
from coordinator.figures_log import FiguresLog
from coordinator.generate import generate
from coordinator.rejection.errors import RowError, RuleError
from coordinator.rejection.options import RejectionOptions
from coordinator.rejection.resolution import AcceptanceRule, resolve
from coordinator.rejection.uniforms import NO_UNIFORMS, draw_uniforms
from coordinator.rules import TokenizedRequest, check_request
from coordinator.settings import CoordinatorSettings
from coordinator.target_client import RowChoice, TargetClient, TargetSequence
from coordinator.text import Detokenizer, StopStrings
from coordinator.thinking import ThinkSpans, think_spans
from coordinator.tokenizer import encode
from tandem.channels import closing
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import (
    Acceptance,
    Chunk,
    DraftOptions,
    GenerationRequest,
    ModelInfo,
    Proposal,
    SamplingParams,
    TargetOptions,
    Verification,
)


@dataclass(frozen=True, slots=True)
class Services:
    """What the coordinator joins."""

    target: TargetClient
    draft: DraftClient | None
    target_info: ModelInfo
    draft_info: ModelInfo | None
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
    think_spans: ThinkSpans | None
    """Followed when acceptance is relaxed inside them."""

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


class Completions:
    """Completes requests over the services it is connected to."""

    services: Services
    """Set by `connect`, before the server lets calls through."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self.figures = FiguresLog()

    def connect(self, services: Services) -> None:
        """Begin to use these services."""
        self.services = services

    async def complete(
        self, request: GenerationRequest, deadline_seconds: float | None = None
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion.

        Raises:
            InvalidRequestError: with a sentence for each rule that the request breaks.
            TandemError: the target failed.
        """
        plan = await self._plan(request)
        completion = Completion(
            plan.prompt,
            plan.limits,
            Detokenizer(self.services.tokenizer),
            StopStrings(request.stop),
            request_id=plan.request_id,
            seed=plan.sampling.seed,
        )
        async with AsyncExitStack() as streams:
            drafter = await streams.enter_async_context(closing(self._drafter(plan, deadline_seconds)))
            verifier = await streams.enter_async_context(closing(self._verifier(plan, deadline_seconds)))
            # What an abandoned request did counts as well.
            streams.callback(self.figures.add, plan.rule.name, completion.figures)
            async for chunk in generate(completion, drafter, verifier, partial(plan.accept, completion)):
                yield chunk

    async def _plan(self, request: GenerationRequest) -> Plan:
        info, settings = self.services.target_info, self._settings
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await encode(self.services.tokenizer, prompt)
        check_request(TokenizedRequest(request, prompt, info, self.services.draft_info))
        sampling = _sampling(request)
        options = requested_options(settings, request)
        count = options.num_speculative_tokens
        room = info.max_length - len(prompt)
        return Plan(
            request_id=uuid.uuid4().hex,
            request=request,
            prompt=prompt,
            sampling=sampling,
            limits=Limits(
                max_length=info.max_length,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                eos_token_ids=() if request.ignore_eos else frozenset(info.eos_token_ids),
            ),
            rule=_rule(options, sampling, request),
            num_speculative_tokens=count if request.speculation and self.services.draft is not None else 0,
            think_spans=(
                think_spans(self.services.tokenizer) if options.use_relaxed_acceptance_for_thinking else None
            ),
        )

    def _drafter(self, plan: Plan, deadline_seconds: float | None) -> DraftSequence | NoDrafter:
        if self.services.draft is None or plan.num_speculative_tokens == 0:
            return NoDrafter()
        options = DraftOptions(
            request_id=plan.request_id,
            sampling=plan.sampling,
            max_length=len(plan.prompt) + plan.limits.max_tokens,
            row_kind=plan.rule.strategy.draft_row_kind,
            draft_top_k=self._settings.draft_top_k,
            with_token_logits=plan.rule.strategy.needs_token_logits,
        )
        limits = DraftLimits(
            plan.num_speculative_tokens,
            self.services.target_info.vocabulary_size,
            self._settings.draft_patience_seconds,
        )
        return self.services.draft.sequence(options, limits, deadline_seconds)

    def _verifier(self, plan: Plan, deadline_seconds: float | None) -> TargetSequence:
        options = TargetOptions(
            request_id=plan.request_id,
            sampling=plan.sampling,
            max_length=len(plan.prompt) + plan.limits.max_tokens,
            prompt_length=len(plan.prompt),
        )
        rows = RowChoice(
            plan.rule.row_kind(plan.request.row_kind), plan.rule.supports, plan.rule.needs_statistics
        )
        return self.services.target.sequence(options, rows, deadline_seconds)


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

"""From a request to its stream of chunks: check it, open its streams, run its rounds, close them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from tokenizers import Tokenizer

from coordinator.admission import Admission
from coordinator.ahead import one_ahead
from coordinator.bounds import RequestBounds, check_bounds
from coordinator.deadline import Deadline
from coordinator.draft_client import DraftLimits, NoDrafter
from coordinator.failover_draft import FailoverDrafter
from coordinator.failover_target import FailoverVerifier
from coordinator.figures_log import FiguresLog
from coordinator.generate import generate
from coordinator.live_config import LiveConfig
from coordinator.logprobs import LogprobsRecorder
from coordinator.observer import Observer, RequestObserver
from coordinator.pace import Pace
from coordinator.payoff import Payoff
from coordinator.plan import Models, Plan, make_plan
from coordinator.replicas import Replicas
from coordinator.requests import ActiveRequest, Requests
from coordinator.restraint import Restraint
from coordinator.target_client import RowChoice
from coordinator.time_limit import within
from tandem.channels import closing
from tandem.types import (
    Chunk,
    DraftOptions,
    GenerationRequest,
    ModelInfo,
    TargetOptions,
)


@dataclass(frozen=True, slots=True)
class Services:
    """What the coordinator joins."""

    replicas: Replicas
    target_info: ModelInfo
    draft_info: ModelInfo | None
    """None when the target works alone. A draft that is away for a while is still what requests are checked against."""
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class _Run:
    """A request that runs, and what its drafter and its verifier share."""

    plan: Plan
    observer: RequestObserver
    active: ActiveRequest
    pace: Pace
    deadline: Deadline


class Completions:
    """Completes requests over the services it is connected to."""

    services: Services
    """Set by `connect`, before the server lets calls through."""

    def __init__(self, live_config: LiveConfig, observer: Observer) -> None:
        self._live_config = live_config
        self._observer = observer
        bounds = live_config.current
        self.admission = Admission(bounds.max_concurrent_requests, bounds.max_queued_requests)
        self._restraints: dict[tuple[str, int], Restraint] = {}
        self.requests = Requests()
        self.figures = FiguresLog()

    def connect(self, services: Services) -> None:
        """Begin to use these services."""
        self.services = services

    @property
    def models(self) -> Models:
        """What completes requests."""
        services = self.services
        return Models(services.target_info, services.draft_info, services.tokenizer)

    @property
    def bounds(self) -> RequestBounds:
        """What a request may ask for at most, as configured by now."""
        return self._live_config.current

    async def complete(
        self,
        request: GenerationRequest,
        deadline_seconds: float | None = None,
        request_id: str | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion.

        Args:
            request: What to complete, and how.
            deadline_seconds: How long its client waits at most; None: without end.
            request_id: Its name in logs, traces and the list of requests; made up when there is none.
            traceparent: The client's W3C trace context; empty when it sent none.

        Raises:
            InvalidRequestError: with a sentence for each rule that the request breaks.
            TandemError: the target failed.
        """
        request_id = request_id or uuid.uuid4().hex
        observer = self._observer.begin(request_id, traceparent)
        with _told(observer):
            admitted = self._admitted(request, request_id, observer, Deadline(deadline_seconds))
            async with aclosing(one_ahead(within(admitted, deadline_seconds))) as chunks:
                async for chunk in chunks:
                    yield chunk

    def refuse(self, traceparent: str) -> NoReturn:
        """Refuse a request that nobody has read, since no more may wait.

        Args:
            traceparent: The client's W3C trace context; empty when it sent none.

        Raises:
            CapacityError: always.
        """
        with _told(self._observer.begin(uuid.uuid4().hex, traceparent)):
            raise self.admission.refusal()

    async def _admitted(
        self,
        request: GenerationRequest,
        request_id: str,
        observer: RequestObserver,
        deadline: Deadline,
    ) -> AsyncGenerator[Chunk]:
        """The same once it has a place among those that run."""
        # What waits is held: hundreds of requests of any size would take all memory.
        self._check_bounds(request)
        async with self.admission.place(deadline.remaining_seconds):
            observer.admitted()
            plan = await self._plan(request, request_id)
            async with aclosing(self._run(plan, observer, deadline)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _check_bounds(self, request: GenerationRequest) -> None:
        settings, target = self._live_config.current, self.services.target_info
        check_bounds(request, settings, settings.num_speculative_tokens, target.max_length)

    async def _run(self, plan: Plan, observer: RequestObserver, deadline: Deadline) -> AsyncGenerator[Chunk]:
        """The rounds of a request, between the opening of its streams and their end."""
        completion = plan.begin(self.services.tokenizer)
        observer.planned(completion, plan.details)
        async with AsyncExitStack() as streams:
            # What an abandoned request did counts as well, and from the moment on in which it no longer runs.
            streams.callback(self.figures.add, plan.rule.name, completion.figures)
            active = streams.enter_context(self.requests.running(plan.active(completion)))
            run = _Run(plan, observer, active, Pace(plan.draft_patience_seconds), deadline)
            drafter = await streams.enter_async_context(closing(self._drafter(run)))
            verifier = await streams.enter_async_context(closing(self._verifier(run)))
            active.streams = (drafter, verifier)
            streams.enter_context(self.figures.following(active))
            logprobs = LogprobsRecorder(plan.request.logprobs)
            accept = logprobs.watching(partial(plan.accept, completion))
            async for chunk in generate(completion, *observer.observing(drafter, verifier, accept)):
                self.requests.tokens.add(len(chunk.token_ids))
                with active.delivering():
                    yield logprobs.added_to(chunk)

    async def _plan(self, request: GenerationRequest, request_id: str) -> Plan:
        return await make_plan(request, request_id, self._live_config.current, self.models)

    def _drafter(self, run: _Run) -> FailoverDrafter | NoDrafter:
        plan, drafts = run.plan, self.services.replicas.drafts
        if not drafts.addresses or plan.num_speculative_tokens == 0:
            return NoDrafter()
        options = DraftOptions(
            request_id=plan.request_id,
            sampling=plan.sampling,
            max_length=len(plan.prompt) + plan.limits.max_tokens,
            row_kind=plan.rule.strategy.draft_row_kind,
            draft_top_k=plan.draft_top_k,
            with_token_logits=plan.rule.strategy.needs_token_logits,
        )
        limits = DraftLimits(plan.num_speculative_tokens, self.services.target_info.vocabulary_size)
        payoff = Payoff(may_pause=plan.may_pause_draft, restraint=self._restraint(plan))
        return FailoverDrafter(drafts, options, limits, run.active, run.observer, run.pace, payoff)

    def _restraint(self, plan: Plan) -> Restraint:
        """By rule, since what a round costs depends on the rows that the rule needs."""
        count = plan.num_speculative_tokens
        fresh = Restraint(count, lambda: self.admission.running)
        return self._restraints.setdefault((plan.rule.name, count), fresh)

    def _verifier(self, run: _Run) -> FailoverVerifier:
        plan = run.plan
        options = TargetOptions(
            request_id=plan.request_id,
            sampling=plan.sampling,
            max_length=len(plan.prompt) + plan.limits.max_tokens,
            prompt_length=len(plan.prompt),
        )
        rows = RowChoice(
            plan.rule.row_kind(plan.request.row_kind),
            plan.rule.supports,
            self.services.target_info.vocabulary_size,
            plan.rule.needs_statistics,
        )
        return FailoverVerifier(
            self.services.replicas.targets,
            options,
            rows,
            run.active,
            run.observer,
            run.pace,
            run.deadline,
            plan.target_wait_seconds,
        )


@contextmanager
def _told(observer: RequestObserver) -> Iterator[None]:
    """Tell the observer how the block ended."""
    try:
        yield
    except BaseException as error:
        observer.finished(error)
        raise
    observer.finished(None)

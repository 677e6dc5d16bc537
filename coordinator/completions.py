"""From a request to its stream of chunks: check it, open its streams, run its rounds, close them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer

from coordinator.admission import Admission
from coordinator.draft_client import DraftClient, DraftLimits, DraftSequence, NoDrafter
from coordinator.figures_log import FiguresLog
from coordinator.generate import generate
from coordinator.live_config import LiveConfig
from coordinator.logprobs import LogprobsRecorder
from coordinator.observer import Observer, RequestObserver
from coordinator.plan import Models, Plan, make_plan
from coordinator.requests import Requests
from coordinator.target_client import RowChoice, TargetClient, TargetSequence
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

    target: TargetClient
    draft: DraftClient | None
    target_info: ModelInfo
    draft_info: ModelInfo | None
    tokenizer: Tokenizer


class Completions:
    """Completes requests over the services it is connected to."""

    services: Services
    """Set by `connect`, before the server lets calls through."""

    def __init__(self, live_config: LiveConfig, observer: Observer) -> None:
        self._live_config = live_config
        self._observer = observer
        bounds = live_config.current
        self.admission = Admission(bounds.max_concurrent_requests, bounds.max_queued_requests)
        self.requests = Requests()
        self.figures = FiguresLog()

    def connect(self, services: Services) -> None:
        """Begin to use these services."""
        self.services = services

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
        observer = self._observer.begin(request_id, request, traceparent)
        with _told(observer):
            admitted = self._admitted(request, request_id, observer, deadline_seconds)
            async with aclosing(within(admitted, deadline_seconds)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _admitted(
        self,
        request: GenerationRequest,
        request_id: str,
        observer: RequestObserver,
        deadline_seconds: float | None,
    ) -> AsyncGenerator[Chunk]:
        """The same once it has a place among those that run."""
        async with self.admission.place(deadline_seconds):
            observer.admitted()
            plan = await self._plan(request, request_id)
            async with aclosing(self._run(plan, observer, deadline_seconds)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _run(
        self, plan: Plan, observer: RequestObserver, deadline_seconds: float | None
    ) -> AsyncGenerator[Chunk]:
        """The rounds of a request, between the opening of its streams and their end."""
        completion = plan.begin(self.services.tokenizer)
        observer.planned(completion, plan.details)
        async with AsyncExitStack() as streams:
            # What an abandoned request did counts as well, and from the moment on in which it no longer runs.
            streams.callback(self.figures.add, plan.rule.name, completion.figures)
            active = streams.enter_context(self.requests.running(plan.active(completion)))
            drafter = await streams.enter_async_context(
                closing(self._drafter(plan, observer, deadline_seconds))
            )
            verifier = await streams.enter_async_context(
                closing(self._verifier(plan, observer, deadline_seconds))
            )
            active.streams = (drafter, verifier)
            logprobs = LogprobsRecorder(plan.request.logprobs)
            accept = logprobs.watching(partial(plan.accept, completion))
            async for chunk in generate(completion, *observer.observing(drafter, verifier, accept)):
                self.requests.tokens.add(len(chunk.token_ids))
                with active.delivering():
                    yield logprobs.added_to(chunk)

    async def _plan(self, request: GenerationRequest, request_id: str) -> Plan:
        services = self.services
        models = Models(services.target_info, services.draft_info, services.tokenizer)
        return await make_plan(request, request_id, self._live_config.current, models)

    def _drafter(
        self, plan: Plan, observer: RequestObserver, deadline_seconds: float | None
    ) -> DraftSequence | NoDrafter:
        if self.services.draft is None or plan.num_speculative_tokens == 0:
            return NoDrafter()
        options = DraftOptions(
            request_id=plan.request_id,
            sampling=plan.sampling,
            max_length=len(plan.prompt) + plan.limits.max_tokens,
            row_kind=plan.rule.strategy.draft_row_kind,
            draft_top_k=plan.draft_top_k,
            with_token_logits=plan.rule.strategy.needs_token_logits,
        )
        limits = DraftLimits(
            plan.num_speculative_tokens,
            self.services.target_info.vocabulary_size,
            plan.draft_patience_seconds,
        )
        watch = observer.stream("draft", self._live_config.current.draft_address or "")
        return self.services.draft.sequence(options, limits, deadline_seconds, watch)

    def _verifier(
        self, plan: Plan, observer: RequestObserver, deadline_seconds: float | None
    ) -> TargetSequence:
        options = TargetOptions(
            request_id=plan.request_id,
            sampling=plan.sampling,
            max_length=len(plan.prompt) + plan.limits.max_tokens,
            prompt_length=len(plan.prompt),
        )
        rows = RowChoice(
            plan.rule.row_kind(plan.request.row_kind), plan.rule.supports, plan.rule.needs_statistics
        )
        watch = observer.stream("target", self._live_config.current.target_address)
        return self.services.target.sequence(options, rows, deadline_seconds, watch)


@contextmanager
def _told(observer: RequestObserver) -> Iterator[None]:
    """Tell the observer how the block ended."""
    try:
        yield
    except BaseException as error:
        observer.finished(error)
        raise
    observer.finished(None)

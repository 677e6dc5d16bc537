"""Runs requests: admission, plan, the round loop over replicas, and the end. Running ones are listed, ended, and set
aside when their clients do not read."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from tandem.errors import AbortedError, plural
from tandem.model.admin import Outcomes
from tandem.model.speculation_state import SpeculationState
from tandem.model.types import (
    Chunk,
    GenerationRequest,
    RequestTiming,
    RowKind,
    SpeculationStats,
    TargetOptions,
    TokenLogprobs,
)
from tandem.rpc.channels import Deadline
from tandem.serving.scopes import CallerScopes, kinds_of
from tandem_coordinator import speculation_report
from tandem_coordinator.controller import RequestController, SpeculationController, Terms, request_kind
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.decoding.logprobs import details_of, prompt_logprobs, with_most_probable
from tandem_coordinator.replicas.compatibility import head_of
from tandem_coordinator.replicas.registry import ReplicaRegistry
from tandem_coordinator.requests.admission import Admission, Place
from tandem_coordinator.requests.chunks import ChunkPacer, ChunkQueue, stream_of
from tandem_coordinator.requests.plan import Models, Plan, make_plan
from tandem_coordinator.requests.validation import BoundedRequest
from tandem_coordinator.rounds.draft_side import FailoverDraft, NoDraft, Patience
from tandem_coordinator.rounds.events import RequestEvents
from tandem_coordinator.rounds.session import RoundSession, TargetAlone
from tandem_coordinator.rounds.target_side import FailoverTarget
from tandem_coordinator.settings.coordinator import MAX_SPECULATIVE_TOKENS, CoordinatorSettings
from tandem_coordinator.settings.live import LiveConfig
from tandem_coordinator.stats.rounds import RoundEnded, RoundTally
from tandem_coordinator.stats.speculation import StatsLog, TokenCounter
from tandem_coordinator.telemetry.observer import Choices, Observer, RequestObserver
from tandem_coordinator.transport.draft_client import DraftLimits
from tandem_coordinator.transport.target_client import RowChoice

logger = logging.getLogger(__name__)


class RequestRunner:
    """Completes requests over the services it is connected to."""

    replicas: ReplicaRegistry
    _models: Models
    """The services, and their models. Set by `connect`, before the server lets calls through."""

    def __init__(self, live_config: LiveConfig, observer: Observer) -> None:
        self._live_config = live_config
        self._observer = observer
        bounds = live_config.current
        shared = kinds_of(bounds.share_between_callers)
        self._scopes = CallerScopes(bounds.service_credentials, shared)
        self.admission = Admission(
            bounds.max_concurrent_requests, bounds.max_queued_requests, bounds.max_streams_per_peer
        )
        self.speculation = SpeculationController()
        self.requests = ActiveRequests(bounds.stalled_stream_seconds)
        self.stats = StatsLog()
        self._pacer = ChunkPacer()
        self._latest_state: SpeculationState | None = None
        """State of the last request that could speculate and has ended."""

    def connect(self, replicas: ReplicaRegistry, models: Models) -> None:
        self.replicas = replicas
        self._models = models

    @property
    def models(self) -> Models:
        """The models that complete requests now: a draft may join after the start."""
        models = self._models
        draft = self.replicas.fleet.draft
        if models.draft is not draft:
            models = self._models = replace(models, draft=draft)
        return models

    @property
    def bounds(self) -> CoordinatorSettings:
        return self._live_config.current

    async def complete(
        self,
        request: GenerationRequest,
        deadline_seconds: float | None = None,
        request_id: str | None = None,
        traceparent: str = "",
        peer: str = "",
        token: str = "",
        choices: Choices | None = None,
        has_place: asyncio.Event | None = None,
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion. The id is its name in logs, traces and the list of requests; `traceparent` the
        client's W3C trace context, `peer` its address from `tandem_coordinator.requests.admission`, and `token` the
        token by which it is known, each empty when there is none. It is one of these choices of the client's. One of a
        batch, which is the stream that counts, has an event to set when it has its place."""
        name = request_id or uuid.uuid4().hex
        observer = self._observer.begin(name, traceparent, choices)
        deadline = Deadline(deadline_seconds)
        asked = time.monotonic()

        async def run(queue: ChunkQueue) -> None:
            # Waiting requests stay in memory: hundreds of any size would take all of it.
            models = self.models
            bounded = BoundedRequest(
                request, self.bounds, models.target.max_length, models.max_text_bytes, models.draft
            )
            bounded.check()
            async with self.admission.place(
                deadline.remaining_seconds, peer, request.priority, in_batch=has_place is not None
            ) as place:
                observer.admitted()
                times = RequestTimes(asked, time.monotonic())
                if has_place is not None:
                    has_place.set()
                scopes = self._scopes.of(token=token, address=peer, salt=request.cache_salt)
                plan = await make_plan(request, name, self.bounds, self.models, scopes, self._choose_rule)
                await self._run_rounds(plan, observer, deadline, place, times, queue)

        stream = self.admission.stream(peer) if has_place is None else nullcontext()
        with _observe(observer), stream:
            queue = ChunkQueue(self.bounds.stream_interval, self._pacer)
            async with aclosing(stream_of(run, queue, deadline_seconds)) as chunks:
                async for chunk in chunks:
                    yield chunk

    @contextmanager
    def preparation(self, peer: str, traceparent: str = "") -> Iterator[None]:
        """Count a request of this peer as one that waits while the block makes its prompt; refuse it where it would
        wait in vain."""
        if self.admission.refuses(peer):
            self.refuse(traceparent)
        with self.admission.preparation(peer):
            yield

    def refuse(self, traceparent: str) -> NoReturn:
        with _observe(self._observer.begin(uuid.uuid4().hex, traceparent)):
            raise self.admission.reject()

    async def _run_rounds(
        self,
        plan: Plan,
        observer: RequestObserver,
        deadline: Deadline,
        place: Place,
        times: RequestTimes,
        queue: ChunkQueue,
    ) -> None:
        completion = plan.begin()
        observer.planned(completion, plan.details)
        tally = RoundTally()
        events = RequestEvents(
            plan.request_id,
            observer,
            (
                tally.add_round,
                self.requests.count_tokens,
                partial(self.stats.round_ended, plan.rule.name),
                self.replicas.round_ended,
                observer.round_ended,
            ),
        )

        def open_target(options: TargetOptions, kind: RowKind) -> FailoverTarget:
            rows = RowChoice(plan.rule, kind, plan.models.target.vocabulary_size)
            wait_seconds = plan.settings.target_wait_seconds
            return FailoverTarget(
                self.replicas.targets, options, rows, events, observer, deadline, wait_seconds
            )

        target = open_target(plan.target_options(place.client), plan.row_kind)
        speculation = self._speculation(plan)
        draft = self._draft(plan, speculation, events, observer, place.client, target)
        if isinstance(draft, FailoverDraft):
            target.on_states = draft.take_states
        active = ActiveRequest(plan, completion, place, times, tally, draft, target, speculation)
        async with AsyncExitStack() as streams:
            streams.enter_context(self.requests.running(active))
            streams.callback(self._count_request, active, observer)
            if speculation is not None:
                events.subscribe(speculation.round_ended)
            await streams.enter_async_context(_close_at_end(draft))
            await streams.enter_async_context(_close_at_end(target))
            if plan.shows_prompt:
                scoring = open_target(plan.scoring_options(place.client), RowKind.DENSE)
                async with aclosing(_show_prompt(plan, completion, scoring)) as shown:
                    async for chunk in shown:
                        await queue.put(self._with_summary(chunk, active))
            session = RoundSession(
                completion,
                draft,
                target,
                speculation or TargetAlone(),
                plan.accept,
                events,
                plan.session_policy,
                self._load,
                details_of(plan.request, plan.sampling),
            )
            async for chunk in await streams.enter_async_context(aclosing(session.rounds())):
                active.checks = 0
                times.note_tokens()
                await queue.put(self._with_summary(chunk, active))
                active.checks = None
                if active.has_stalled and completion.can_extend:
                    await active.resume()

    def _speculation(self, plan: Plan) -> RequestController | None:
        """The controller's part for a request; None where the target serves it alone."""
        replicas = self.replicas
        controller = self.speculation
        draft_name = plan.models.draft_name
        if plan.num_speculative_tokens == 0:
            return None
        kind = request_kind(draft_name, plan.rule.name, plan.sampling.temperature)
        terms = Terms(
            kind,
            plan.num_speculative_tokens,
            plan.policy,
            plan.draft_ahead,
            leads=plan.lead > 0,
            has_head=plan.asks_head,
        )
        # The request has no target yet: begin with the cost model of the one that it is likely to get.
        target = replicas.targets.choose()
        draft = replicas.drafts.choose()
        if target is not None:
            controller.introduce(target.address, target.model, target.round_trip.value)
            if plan.asks_head and target.model is not None:
                controller.introduce(draft_name, head_of(target.model), None)
        if draft is not None:
            controller.introduce(draft_name, draft.model, draft.round_trip.value)
        return controller.request(terms, "" if target is None else target.address)

    def _draft(
        self,
        plan: Plan,
        speculation: RequestController | None,
        events: RequestEvents,
        observer: RequestObserver,
        client: str,
        target: FailoverTarget,
    ) -> FailoverDraft | NoDraft:
        if speculation is None:
            return NoDraft(speculation_report.off(self._why_alone(plan)))
        if plan.asks_head:
            return NoDraft(None)
        patience = Patience(plan.settings.draft_patience_seconds)
        events.subscribe(patience.round_ended)
        leads = plan.lead > 0 and plan.can_lead_with_proposals
        return FailoverDraft(
            self.replicas.drafts,
            plan.draft_options(speculation.terms.max_budget, client),
            plan.scopes,
            DraftLimits(
                plan.num_speculative_tokens,
                plan.models.target.vocabulary_size,
                keeps_proposals=plan.keeps_proposals,
                max_length=plan.settings.draft_max_length,
            ),
            patience,
            events,
            observer,
            target.pass_on if leads else None,
        )

    def _count_request(self, active: ActiveRequest, observer: RequestObserver) -> None:
        """Count what is known only once the rounds of a request have ended."""
        stats = active.stats
        self.stats.led(active.plan.rule.name, stats.lead)
        observer.record_statistics(stats, active.target.cache)

    def _why_alone(self, plan: Plan) -> str:
        if not self.replicas.drafts.addresses and plan.models.draft is None:
            return speculation_report.NO_DRAFT
        if plan.kept_out_by:
            return speculation_report.PENALIZED
        return speculation_report.NOT_ASKED if plan.settings.speculation else speculation_report.DISABLED

    def _load(self, target_address: str | None) -> int:
        """Sequences that share a request's target; before it has one, its share of all that run."""
        targets = self.replicas.targets
        member = targets.members.get(target_address or "")
        if member is not None:
            return member.open_sequences
        ready = sum(member.is_ready for member in targets.members.values())
        return -(-self.admission.running // max(ready, 1))

    def _with_summary(self, chunk: Chunk, active: ActiveRequest) -> Chunk:
        """The last chunk with the statistics of the rounds, the sampling parameters, and the state of speculation,
        which the next requests can expect too; others as they are."""
        if (summary := chunk.summary) is None:
            return chunk
        stats = active.stats
        state = active.speculation_state
        if active.plan.num_speculative_tokens > 0 and stats.rounds > 1:
            self._latest_state = state
        whole = replace(
            summary,
            speculation=stats,
            speculation_state=speculation_report.at_the_end(state, stats),
            sampling=active.plan.sampling,
            cached_tokens=None if active.target.cache is None else active.target.cache.cached_tokens,
            weights=active.target.weights,
            timing=active.times.report(),
        )
        return replace(chunk, summary=whole)

    @property
    def speculation_state(self) -> SpeculationState | None:
        """State of the oldest running request, else of the last that ended; None before any."""
        running = [request for request in self.requests.list() if request.plan.num_speculative_tokens > 0]
        return running[0].speculation_state if running else self._latest_state

    def _choose_rule(self, names: Sequence[str], temperature: float) -> str:
        draft = self.models.draft_name
        return self.speculation.choose_rule(names, draft, temperature, self.admission.running)


async def _show_prompt(plan: Plan, completion: Completion, scoring: FailoverTarget) -> AsyncGenerator[Chunk]:
    """The first chunks, which tell what is asked of the prompt; the last one ends a completion of no tokens.
    The target of `scoring` is only asked where that is log probabilities."""
    request = plan.request
    echoed = request.logprobs if request.echo else None
    counts = [count for count in (echoed, request.prompt_logprobs) if count is not None]
    found: tuple[TokenLogprobs, ...] = ()
    if counts:
        async with _close_at_end(scoring):
            found = await prompt_logprobs(plan.begin(), scoring.verify, max(counts), MAX_SPECULATIVE_TOKENS)
    if request.prompt_logprobs is not None:
        scored = with_most_probable(found, request.prompt_logprobs)
        # In parts: to write all at once would hold the event loop for long.
        for start in range(0, len(scored), MAX_SPECULATIVE_TOKENS):
            part = slice(start, start + MAX_SPECULATIVE_TOKENS)
            yield Chunk("", (), (), (), prompt_token_ids=plan.prompt[part], prompt_logprobs=scored[part])
    if request.echo:
        logprobs = () if echoed is None else with_most_probable(found, echoed)
        yield replace(completion.echoed(), logprobs=logprobs)


@asynccontextmanager
async def _close_at_end(side: FailoverDraft | NoDraft | FailoverTarget) -> AsyncIterator[None]:
    """Finish the sequence when the block succeeds, and drop it in any case, so that an error ends computation at
    once."""
    try:
        yield
        await side.finish()
    finally:
        side.cancel()


@contextmanager
def _observe(observer: RequestObserver) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        observer.finished(error)
        raise
    observer.finished(None)


# ---- the running requests


@dataclass(slots=True, eq=False)
class RequestTimes:
    """Moments of a request, by the monotonic clock."""

    asked: float
    admitted: float
    first_token: float | None = None
    last_token: float | None = None

    def note_tokens(self) -> None:
        """Note that tokens have come."""
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token

    def report(self) -> RequestTiming:
        """The time that each part has taken so far."""
        queue_seconds = self.admitted - self.asked
        if self.first_token is None or self.last_token is None:
            return RequestTiming(queue_seconds, None, 0.0)
        return RequestTiming(
            queue_seconds, self.first_token - self.admitted, self.last_token - self.first_token
        )


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that runs."""

    plan: Plan
    completion: Completion
    place: Place
    times: RequestTimes
    tally: RoundTally
    draft: FailoverDraft | NoDraft
    target: FailoverTarget
    speculation: RequestController | None
    """None: the target serves it alone."""
    started: float = field(default_factory=time.monotonic)
    """By the monotonic clock."""
    has_stalled: bool = False
    """True if it has given up its places because its client does not read."""
    abort_reason: str | None = None
    """Reason given by whoever aborted it, may be empty; None while it was not aborted."""
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    """It runs in the task that makes it."""
    checks: int | None = None
    """Checks for stalled streams since a chunk began to wait for the client; None while the services compute."""

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def completion_tokens(self) -> int:
        return self.completion.length - len(self.plan.prompt)

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of its rounds so far."""
        stats = self.tally.stats()
        stats.lead = self.target.lead_stats
        return stats

    @property
    def speculation_state(self) -> SpeculationState:
        """The state of speculation: on or off, the number of tokens, and the reason."""
        trouble = self.draft.trouble
        if trouble is not None or self.speculation is None:
            return trouble or speculation_report.off(speculation_report.NOT_ASKED)
        return speculation_report.decided(self.speculation)

    def stall(self) -> None:
        """Give up its places here and on the services while a chunk waits for its client."""
        self.has_stalled = True
        self.draft.release()
        self.target.release()
        self.place.release()

    async def resume(self) -> None:
        """Take a place again after it has given up its own. The next round takes places on the services."""
        await self.place.take_again()
        self.has_stalled = False

    def abort(self, reason: str = "") -> None:
        """End it. The services free it now, and its client receives the error as soon as it reads."""
        if self.abort_reason is None:
            self.abort_reason = reason
            if self.task is not None:
                self.task.cancel()


_CHECKS = 4
"""A stream has stalled if it still delivers the same chunk at so many checks in a row after the first."""


class ActiveRequests:
    """All running requests, and how earlier ones ended. Those whose clients do not read give up their places.

    A timer for each chunk would cost more than the chunk, so one timer checks all streams now and then. It counts
    checks, not seconds: after a pause of the whole process no client has had a chance to read.
    """

    def __init__(self, stalled_seconds: float) -> None:
        """A stream stalls when a chunk has waited for so many seconds, or up to a quarter longer."""
        self.tokens = TokenCounter()
        self._check_interval = stalled_seconds / _CHECKS
        self._next_check: asyncio.TimerHandle | None = None
        self._active: dict[str, ActiveRequest] = {}
        self._ended = {"completed": 0, "failed": 0, "cancelled": 0, "aborted": 0}

    @contextmanager
    def running(self, request: ActiveRequest) -> Iterator[ActiveRequest]:
        self._active[request.request_id] = request
        if self._next_check is None:
            self._check_later()
        outcome = "failed"
        try:
            yield request
            outcome = "completed"
        except (asyncio.CancelledError, GeneratorExit) as error:
            outcome = "cancelled"
            if request.abort_reason is None or isinstance(error, GeneratorExit):
                raise
            # `abort` has caused the cancellation
            reason = f": {request.abort_reason}" if request.abort_reason else ""
            raise AbortedError(
                f"an administrator ended the request after {plural(request.completion_tokens, 'token')}{reason}"
            ) from None
        finally:
            self._ended[outcome if request.abort_reason is None else "aborted"] += 1
            del self._active[request.request_id]

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(**self._ended)

    def count_tokens(self, ended: RoundEnded) -> None:
        self.tokens.add(ended.committed)

    def list(self) -> list[ActiveRequest]:
        """All running requests, the oldest first."""
        return [*self._active.values()]

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(self._check_interval, self._check)

    def _check(self) -> None:
        self._next_check = None
        for active in self._active.values():
            if active.checks is None or active.has_stalled:
                continue
            active.checks += 1
            if active.checks > _CHECKS:
                active.stall()
                extra = {"request_id": active.request_id, "tokens": active.completion_tokens}
                logger.info("stalled stream", extra=extra)
        if self._active:
            self._check_later()

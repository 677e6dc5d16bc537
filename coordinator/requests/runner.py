"""From a request to its stream of chunks: check it, open its streams, run its rounds, close them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn

from coordinator.decoding.completion import Completion
from coordinator.decoding.logprobs import LogprobsRecorder
from coordinator.decoding.loop import generate
from coordinator.decoding.rounds import RoundRecorder
from coordinator.requests.active import ActiveRequests
from coordinator.requests.admission import Admission, Place
from coordinator.requests.bounds import check_bounds
from coordinator.requests.chunks.delivery import stream_of
from coordinator.requests.chunks.pacing import ChunkPacer
from coordinator.requests.chunks.queue import ChunkQueue
from coordinator.requests.peers import Peers
from coordinator.requests.plan import Models, Plan, make_plan
from coordinator.requests.replica_streams import (
    Run,
    Services,
    open_drafter,
    open_speculation,
    open_verifier,
)
from coordinator.requests.stalled_streams import StalledStreams
from coordinator.requests.turns import Turns
from coordinator.settings.coordinator import RequestBounds
from coordinator.settings.live import LiveConfig
from coordinator.speculation import report as speculation_report
from coordinator.speculation.controller import SpeculationController
from coordinator.speculation.round_timings import RoundTimings
from coordinator.stats.ahead import record_outcome
from coordinator.stats.log import StatsLog
from coordinator.stats.rounds import RoundResult
from coordinator.telemetry.observer import Observer, RequestObserver
from tandem.rpc.channels import closing
from tandem.rpc.deadline import Deadline
from tandem.speculation_state import SpeculationState
from tandem.types import Chunk, GenerationRequest, Summary


class RequestRunner:
    """Completes requests over the services it is connected to."""

    services: Services
    """Set by `connect`, before the server lets calls through."""

    def __init__(self, live_config: LiveConfig, observer: Observer) -> None:
        self._live_config = live_config
        self._observer = observer
        bounds = live_config.current
        self.admission = Admission(bounds.max_concurrent_requests, bounds.max_queued_requests)
        self.speculation = SpeculationController()
        """How much each round proposes."""
        self.requests = ActiveRequests()
        self.stats = StatsLog()
        self._stalled = StalledStreams(bounds.stalled_stream_seconds)
        self._peers = Peers(
            bounds.max_streams_per_peer or bounds.max_concurrent_requests + bounds.max_queued_requests
        )
        self._pacer = ChunkPacer()
        self.turns = Turns()
        """Large requests take turns to be parsed."""
        self._latest_state: SpeculationState | None = None
        """State of the last request that could speculate and has ended."""

    def connect(self, services: Services) -> None:
        """Begin to use these services."""
        self.services = services

    @property
    def models(self) -> Models:
        """The models that complete requests."""
        services = self.services
        target = replace(services.target_info, features=services.replicas.target_features)
        return Models(target, services.draft_info, services.encoder)

    @property
    def bounds(self) -> RequestBounds:
        """Bounds of a request, as configured now."""
        return self._live_config.current

    async def complete(
        self,
        request: GenerationRequest,
        deadline_seconds: float | None = None,
        request_id: str | None = None,
        traceparent: str = "",
        peer: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion.

        Args:
            request: What to complete, and how.
            deadline_seconds: How long its client waits at most; None: forever.
            request_id: Its name in logs, traces and the list of requests; None: make one up.
            traceparent: The client's W3C trace context; empty when it sent none.
            peer: The client's address from `coordinator.requests.peers`; empty when it is unknown.

        Raises:
            CapacityError: too many requests run and wait, in all or of this client.
            InvalidRequestError: with a sentence for each rule that the request breaks.
            TandemError: the target failed.
        """
        request_id = request_id or uuid.uuid4().hex
        observer = self._observer.begin(request_id, traceparent)
        with _observed(observer), self._peers.stream(peer):
            run = partial(self._run, request, request_id, peer, observer, Deadline(deadline_seconds))
            interval = self._live_config.current.stream_interval
            async with aclosing(stream_of(run, deadline_seconds, interval, self._pacer)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def refuse(self, traceparent: str) -> NoReturn:
        """Refuse an unread request, since the queue is full.

        Args:
            traceparent: The client's W3C trace context; empty when it sent none.

        Raises:
            CapacityError: always.
        """
        with _observed(self._observer.begin(uuid.uuid4().hex, traceparent)):
            raise self.admission.refusal()

    async def _run(
        self,
        request: GenerationRequest,
        request_id: str,
        peer: str,
        observer: RequestObserver,
        deadline: Deadline,
        queue: ChunkQueue,
    ) -> None:
        """Check a request, wait for its place, and run it."""
        # Waiting requests stay in memory: hundreds of any size would take all of it.
        self._check_bounds(request)
        async with self.admission.place(deadline.remaining_seconds, peer) as place:
            observer.admitted()
            plan = await self._plan(request, request_id)
            await self._run_rounds(plan, observer, deadline, place, queue)

    def _check_bounds(self, request: GenerationRequest) -> None:
        settings, models = self._live_config.current, self.models
        check_bounds(
            request,
            settings,
            settings.num_speculative_tokens,
            models.target.max_length,
            models.max_text_bytes,
        )

    async def _run_rounds(
        self, plan: Plan, observer: RequestObserver, deadline: Deadline, place: Place, queue: ChunkQueue
    ) -> None:
        """The rounds of a request, between the opening of its streams and their end."""
        services = self.services
        completion = plan.begin(services.encoder.tokenizer)
        observer.planned(completion, plan.details)
        async with AsyncExitStack() as streams:
            active = streams.enter_context(self.requests.running(plan.active(completion)))
            speculation = open_speculation(services, self.speculation, plan)
            timings = RoundTimings(plan.draft_patience_seconds)
            run = Run(plan, observer, active, timings, deadline, speculation, place.client)
            drafter = open_drafter(services, run, lambda: self.admission.running)
            await streams.enter_async_context(closing(drafter))
            verifier = await streams.enter_async_context(closing(open_verifier(services, run)))
            active.streams, active.place = (drafter, verifier), place
            active.speculation_state = lambda: drafter.speculation_state
            streams.enter_context(self._stalled.following(active))
            logprobs = LogprobsRecorder(plan.request.logprobs)
            accept = logprobs.recording(partial(plan.accept, completion))
            recorder = RoundRecorder(drafter, verifier, accept, timings, active)
            rounds = generate(completion, recorder, recorder, recorder.accept)
            async for chunk in await streams.enter_async_context(aclosing(rounds)):
                self._round_ended(run, completion, recorder.result(chunk))
                if chunk.summary is not None:
                    chunk = self._with_state(chunk, chunk.summary, plan, drafter.speculation_state)
                active.is_delivering = True
                await queue.put(logprobs.added_to(chunk))
                active.is_delivering = False
                if active.has_stalled and completion.can_extend:
                    await active.resume()

    def _round_ended(self, run: Run, completion: Completion, result: RoundResult) -> None:
        """Hand the result of a round to everything that counts rounds."""
        if result.awaited_outcome:
            record_outcome(completion.tally.ahead, result)
        self.requests.tokens.add(result.committed)
        self.stats.round_ended(run.plan.rule.name, result)
        self.services.replicas.round_ended(result)
        run.observer.round_ended(result)
        if run.speculation is not None:
            run.speculation.end_round(result)

    def _with_state(self, chunk: Chunk, summary: Summary, plan: Plan, state: SpeculationState) -> Chunk:
        """The last chunk with the state of speculation, which the next requests can expect too."""
        if plan.num_speculative_tokens > 0 and summary.speculation.rounds > 1:
            self._latest_state = state
        at_the_end = speculation_report.at_the_end(state, summary.speculation)
        return replace(chunk, summary=replace(summary, speculation_state=at_the_end))

    @property
    def speculation_state(self) -> SpeculationState | None:
        """State of the oldest running request, else of the last that ended; None before any."""
        running = [request for request in self.requests.list() if request.num_speculative_tokens > 0]
        return running[0].speculation_state() if running else self._latest_state

    async def _plan(self, request: GenerationRequest, request_id: str) -> Plan:
        return await make_plan(request, request_id, self._live_config.current, self.models, self._choose_rule)

    def _choose_rule(self, names: Sequence[str], temperature: float) -> str:
        draft = self.services.draft_name
        return self.speculation.choose_rule(names, draft, temperature, self.admission.running)


@contextmanager
def _observed(observer: RequestObserver) -> Iterator[None]:
    """Report to the observer how the block ended."""
    try:
        yield
    except BaseException as error:
        observer.finished(error)
        raise
    observer.finished(None)

"""DraftService: translates, and says how busy the draft is, for callers that share it without knowing of each other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TypeAlias, TypeVar

from tandem.errors import ConfigurationError
from tandem.model.types import DraftLoad, DraftOptions, HiddenStates, Proposal, ProposeStep
from tandem.serving.interceptors import Context
from tandem.serving.streams import SequenceStreams, ServedSequence, Translation
from tandem.telemetry.streams import NO_SERVICE_OBSERVER, ServiceObserver
from tandem.v1 import draft_pb2
from tandem.v1.draft_pb2_grpc import DraftServiceServicer
from tandem.wire import draft as wire
from tandem.wire.common import COVERAGE, model_info_to_proto, statistics_to_proto
from tandem_draft.proposers import Proposer

SequenceT = TypeVar("SequenceT")

DraftedFor: TypeAlias = ServedSequence[DraftOptions, ProposeStep, wire.Answer]


class LoadTracker:
    """Counts sequences and times waits. Belongs to one event loop."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self.sequences = self.waiting = 0
        self._is_full = is_full
        self._wait_seconds = 0.0
        self._answered_at = 0.0

    @property
    def now(self) -> DraftLoad:
        # Nobody waits at a draft that has answered nothing for so long
        is_idle = time.monotonic() - self._answered_at > 1.0
        wait = 0.0 if is_idle else self._wait_seconds
        return DraftLoad(self.sequences, self.waiting, self._is_full(), wait)

    @asynccontextmanager
    async def sequence(self, opening: AbstractAsyncContextManager[SequenceT]) -> AsyncIterator[SequenceT]:
        async with AsyncExitStack() as stack:
            self.waiting += 1
            try:
                drafted = await stack.enter_async_context(opening)
            finally:
                self.waiting -= 1
            self.sequences += 1
            try:
                yield drafted
            finally:
                self.sequences -= 1

    def answered(self, seconds: float, proposal: Proposal) -> None:
        """A step was answered after so many seconds. One that only read says nothing: it has no cost of its own."""
        if proposal.cost is not None:
            wait = max(seconds - proposal.cost.seconds, 0.0)
            # Weight of the newest wait: some ten steps, a few rounds of a busy draft
            self._wait_seconds += 0.1 * (wait - self._wait_seconds)
            self._answered_at = time.monotonic()


class DraftServicer(DraftServiceServicer):
    """Lets coordinators ask for proposals."""

    proposer: Proposer
    """Set before the server lets calls through."""

    def __init__(self, observer: ServiceObserver = NO_SERVICE_OBSERVER) -> None:
        self._observer = observer
        self.load = LoadTracker(self._is_full)
        self.streams = SequenceStreams()

    def _is_full(self) -> bool:
        # Sequences end, and say so, also before the model is loaded
        proposer: Proposer | None = getattr(self, "proposer", None)
        return proposer is not None and proposer.is_full

    def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        translation: Translation[DraftOptions, ProposeStep, wire.Answer] = Translation(
            DraftOptions,
            wire.requests_from_proto,
            lambda answers: wire.answers_to_proto(answers, self.load.now),
            HiddenStates,
        )
        return self.streams.serve(request_iterator, self.serve_sequence, translation)

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        options = sequence.options
        with self._observer.stream(options.request_id, options.traceparent) as stream:
            async with self.load.sequence(self.proposer.sequence(options)) as drafted:
                stream.opened()
                sequence.on_note = getattr(drafted, "take_states", sequence.on_note)
                async for step in sequence.steps(drafted.pushed):
                    stream.step_arrived()
                    began = time.monotonic()
                    proposal = await drafted.propose(step)
                    stream.answered(0 if proposal is None else len(proposal))
                    if proposal is not None and step.is_answered:
                        self.load.answered(time.monotonic() - began, proposal)
                        await sequence.answer(proposal)

    async def MapVocabulary(
        self, request_iterator: AsyncIterator[draft_pb2.MapVocabularyRequest], context: Context
    ) -> draft_pb2.MapVocabularyResponse:
        vocabularies = self.proposer.vocabularies
        if vocabularies is None:
            raise ConfigurationError("this draft cannot draft for a target with another tokenizer")
        coverage = await vocabularies.add(await wire.tokenizer_from_proto(request_iterator))
        return draft_pb2.MapVocabularyResponse(coverage=COVERAGE.to_proto(coverage))

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        info = replace(self.proposer.model_info, instance_id=self.streams.instance_id)
        usage = self.proposer.kv_usage()
        return draft_pb2.DraftServiceGetModelInfoResponse(
            model_info=model_info_to_proto(info),
            load=wire.LOAD.to_proto(self.load.now),
            statistics=None if usage is None else statistics_to_proto(usage.statistics),
        )

"""The observer interface of the request path. These observers do nothing; telemetry overrides them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.model.replica import ReplicaSnapshot, Role
from tandem.model.speculation_state import SpeculationDecision
from tandem.model.types import CacheCounts, EngineStatistics, SpeculationStats
from tandem.rpc.channels import Traffic
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.stats.rounds import RoundEnded

EventValue = str | int | float | bool


CHAT = "chat"
TEXT_COMPLETION = "text_completion"
OPERATIONS = (TEXT_COMPLETION, CHAT)
"""Kinds of request, in OpenTelemetry's words (`gen_ai.operation.name`)."""


@dataclass(slots=True)
class Choices:
    """The completions of one prompt that a client asks for at once, each of which is a request."""

    operation: str = TEXT_COMPLETION
    count: int = 1
    """Their number, OpenAI's `n`."""
    longest: int = 0
    """Tokens of the longest that has ended."""
    _ended: int = 0

    def end_one(self, tokens: int) -> bool:
        """Note that one of them has ended with so many tokens; True if it was the last."""
        self.longest = max(self.longest, tokens)
        self._ended += 1
        return self._ended == self.count


@dataclass(slots=True, eq=False)
class StreamObserver:
    """Observes one stream to a service."""

    traceparent: str = ""
    """The W3C trace context that the service's span joins; empty when the request is not traced."""
    traffic: Traffic = field(default_factory=Traffic)
    """Counter of the stream's bytes."""
    ended: Callable[[Exception | None], None] = lambda _: None
    """Called at the end, with an error if it was one."""


class RequestObserver:
    """Observes one request."""

    def admitted(self) -> None:
        """The request has its place."""

    def stream(self, role: str, address: str) -> StreamObserver:
        """A stream to a service is about to be opened. Role: draft or target."""
        return NO_OBSERVER

    def planned(self, completion: Completion, details: Mapping[str, EventValue]) -> None:
        """The request was checked: its completion begins. The details are attributes of its span."""

    def round_ended(self, result: RoundEnded) -> None:
        """A round ended."""

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        """Something happened: draft_lost, draft_late, draft_resumed, draft_paused, target_lost, target_resumed."""

    def record_statistics(self, stats: SpeculationStats, cache: CacheCounts | None) -> None:
        """Take the statistics of all its rounds, and the part that its target's cache has played, where that is known.

        Called at the end of the rounds, before `finished`.
        """

    def finished(self, error: BaseException | None) -> None:
        """The request ended. None: its client has all of it."""


@dataclass(frozen=True, slots=True)
class ReplicaEngine:
    """Figures of a replica's engine."""

    number: int
    """The replica's, among those of its role."""
    statistics: EngineStatistics
    """The latest values, and counts since the replica was met."""


@dataclass(frozen=True, slots=True)
class State:
    """The coordinator at the moment at which its metrics are read."""

    model_name: str
    """The one that the model is served under."""
    num_speculative_tokens: int
    """Tokens that a proposal usually has."""
    running: int
    queued: int
    generated_tokens: int
    """Tokens of all completions since the start."""
    by_rule: Mapping[str, SpeculationStats]
    """Speculation statistics since the start, by acceptance rule."""
    recent: SpeculationStats
    """The same of the last minute."""
    replicas: Sequence[ReplicaSnapshot] = ()
    decisions: Sequence[SpeculationDecision] = ()
    """The proposal length at each load so far."""
    round_counts: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Rounds since the start, by their proposed and their accepted tokens."""
    rejections: Mapping[str, int] = field(default_factory=dict)
    """Requests that found no room, by the limit that they met."""
    engines: Mapping[tuple[Role, str], ReplicaEngine] = field(default_factory=dict)
    """Figures of the replicas' engines, by role and address."""


class Observer:
    """Observes all requests, and the process."""

    def start(self) -> None:
        """Begin to serve and send what is observed."""

    def ready(
        self,
        model_name: str,
        state: Callable[[], State],
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """The services are connected: name the model from now on, and report the coordinator's state. `refresh`
        brings the parts of it up to date that services know; whoever asks for `prometheus_text` does that before."""

    def begin(
        self, request_id: str, traceparent: str = "", choices: Choices | None = None
    ) -> RequestObserver:
        """A request arrived, in the client's trace context if it sent one. It is one of these choices."""
        return RequestObserver()

    def prometheus_text(self) -> bytes | None:
        """All metrics in Prometheus's text form; None when none are collected. Called on the event loop, or on any
        other thread while the loop turns."""
        return None

    async def close(self) -> None:
        """Send the rest, as far as that is quick."""


NO_OBSERVER = StreamObserver()

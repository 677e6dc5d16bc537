"""What the request path tells whoever watches it. Telemetry listens here; nothing on the path depends on an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coordinator.completion import Completion
from coordinator.generate import AcceptanceRule, Drafter, Verifier
from tandem.traffic import Traffic

EventValue = str | int | float | bool


class StreamObserver(Protocol):
    """Watches one stream to a service."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context that the service's span joins; empty when the request is not traced."""

    @property
    def traffic(self) -> Traffic | None:
        """Where to count what the stream carries; None: nobody asks."""

    def ended(self, error: Exception | None = None) -> None:
        """The stream ended. Only the first call counts, so that a failure can be told before the stream is dropped."""


class RequestObserver(Protocol):
    """Watches one request."""

    def admitted(self) -> None:
        """The request has its place."""

    def stream(self, role: str, address: str) -> StreamObserver:
        """A stream to a service is about to be opened. Role: draft or target."""

    def planned(self, completion: Completion, details: Mapping[str, EventValue]) -> None:
        """The request was checked: its completion begins. Details by name: rule, num_speculative_tokens, ..."""

    def observing(
        self, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> tuple[Drafter, Verifier, AcceptanceRule]:
        """The same three, watched."""

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        """Something happened: draft_lost, draft_late, draft_resumed, draft_paused, target_lost, target_resumed."""

    def finished(self, error: BaseException | None) -> None:
        """The request ended. None: its client has all of it."""


class Observer(Protocol):
    """Watches all requests."""

    def begin(self, request_id: str, traceparent: str = "") -> RequestObserver:
        """A request arrived, in the client's trace context if it sent one."""


class NoObserver:
    """Watches nothing, at no cost."""

    traceparent = ""
    traffic = None

    def begin(self, request_id: str, traceparent: str = "") -> NoObserver:
        """Itself."""
        return self

    def admitted(self) -> None:
        """Nothing."""

    def stream(self, role: str, address: str) -> NoObserver:
        """Itself."""
        return self

    def ended(self, error: Exception | None = None) -> None:
        """Nothing."""

    def planned(self, completion: Completion, details: Mapping[str, EventValue]) -> None:
        """Nothing."""

    def observing(
        self, drafter: Drafter, verifier: Verifier, accept: AcceptanceRule
    ) -> tuple[Drafter, Verifier, AcceptanceRule]:
        """The same three."""
        return drafter, verifier, accept

    def event(self, name: str, attributes: Mapping[str, EventValue]) -> None:
        """Nothing."""

    def finished(self, error: BaseException | None) -> None:
        """Nothing."""


NO_OBSERVER = NoObserver()

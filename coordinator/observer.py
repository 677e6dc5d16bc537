"""What the request path tells whoever watches it. Telemetry listens here; nothing on the path depends on an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coordinator.completion import Completion
from coordinator.generate import AcceptanceRule, Drafter, Verifier
from tandem.types import GenerationRequest

EventValue = str | int | float | bool


class RequestObserver(Protocol):
    """Watches one request."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context that the services' spans join; empty when the request is not traced."""

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

    def begin(self, request_id: str, request: GenerationRequest) -> RequestObserver:
        """A request arrived."""


class NoObserver:
    """Watches nothing, at no cost."""

    traceparent = ""

    def begin(self, request_id: str, request: GenerationRequest) -> NoObserver:
        """Itself."""
        return self

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

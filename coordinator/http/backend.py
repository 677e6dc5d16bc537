"""Parts of the coordinator that the HTTP side uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.http.chat.chats import Chats
from coordinator.http.chat.template import ChatTemplate
from coordinator.http.status import status_object
from coordinator.requests.plan import Models
from coordinator.requests.runner import RequestRunner, Turns
from coordinator.settings.coordinator import RequestBounds
from tandem.admin import Status


class CoordinatorBackend:
    """The coordinator behind HTTP."""

    def __init__(
        self,
        completions: RequestRunner,
        status: Callable[[], Awaitable[Status]],
        chats: Chats,
        metrics: Callable[[], Awaitable[tuple[bytes, str] | None]],
    ) -> None:
        self.completions = completions
        self._chats = chats
        self.metrics = metrics
        """Returns the metrics in Prometheus's text form and its content type; None when none are collected."""
        self._status = status

    @property
    def models(self) -> Models:
        """The models that complete requests."""
        return self.completions.models

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Makes a prompt of a chat; None when the model has no template."""
        return self._chats.template

    @property
    def turns(self) -> Turns:
        """Large bodies take turns to be parsed."""
        return self.completions.turns

    @property
    def bounds(self) -> RequestBounds:
        """Bounds of a request."""
        return self.completions.bounds

    async def status(self) -> dict[str, Any]:
        """The page's data."""
        return status_object(await self._status(), chat=self.chat_template is not None)

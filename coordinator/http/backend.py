"""What the HTTP side stands on: the coordinator's own parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator.admin import Administration
from coordinator.bounds import RequestBounds
from coordinator.completions import Completions
from coordinator.http.chat_template import ChatTemplate
from coordinator.http.status import status_object
from coordinator.plan import Models


class CoordinatorBackend:
    """The coordinator behind HTTP."""

    def __init__(
        self,
        completions: Completions,
        administration: Administration,
        metrics: Callable[[], tuple[bytes, str] | None],
    ) -> None:
        self.completions = completions
        self.chat_template: ChatTemplate | None = None
        """Makes a prompt of a chat; read when the services are met, None when the model has none."""
        self.metrics = metrics
        """Tells the metrics in Prometheus's text form, and its content type; None when none are collected."""
        self._administration = administration

    @property
    def models(self) -> Models:
        """What completes requests."""
        return self.completions.models

    @property
    def bounds(self) -> RequestBounds:
        """What a request may ask for at most."""
        return self.completions.bounds

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        return status_object(self._administration.status(), chat=self.chat_template is not None)

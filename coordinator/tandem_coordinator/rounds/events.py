"""The events of a request, and the listeners that are told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tandem.telemetry.logs import log_fault
from tandem_coordinator.stats.rounds import RoundEnded
from tandem_coordinator.telemetry.observer import EventValue, RequestObserver

logger = logging.getLogger(__name__)

RoundListener = Callable[[RoundEnded], None]


class RequestEvents:
    """Tells of the events of one request. A listener that fails is logged, and ends nothing."""

    def __init__(
        self, request_id: str, observer: RequestObserver, listeners: Sequence[RoundListener] = ()
    ) -> None:
        """`listeners` are told of each round, in this order."""
        self._request_id = request_id
        self._observer = observer
        self._listeners = list(listeners)

    def subscribe(self, listener: RoundListener) -> None:
        self._listeners.append(listener)

    def round_ended(self, ended: RoundEnded) -> None:
        for listener in self._listeners:
            try:
                listener(ended)
            except Exception as error:  # noqa: BLE001 - the request must not end by what only watches it
                self._log_failed(error)

    def replica_changed(
        self, name: str, sentence: str, severity: int = logging.INFO, /, **details: EventValue
    ) -> None:
        """Something happened to the replica of one side: draft_lost, draft_late, draft_resumed, draft_paused,
        target_lost or target_resumed."""
        logger.log(severity, sentence, extra={"request_id": self._request_id, **details})
        try:
            self._observer.event(name, details)
        except Exception as error:  # noqa: BLE001 - as above
            self._log_failed(error)

    def _log_failed(self, error: Exception) -> None:
        log_fault(logger, "a listener failed", error, request_id=self._request_id)

"""Refuses requests unread while no more may wait."""

from __future__ import annotations

from typing import Any

import grpc

from coordinator.completions import Completions
from tandem.serving.handlers import Context, Handler, Interceptor, begun_at_once, traceparent_of

GENERATE = "/tandem.v1.GenerationService/Generate"


class Door(Interceptor):
    """Lets requests in as long as there is room for another.

    In a rush every refusal stands in the way of the next. To read a request, only to refuse it, takes a third of the
    coordinator's time for it, so most are refused here; of those that come in the same moment a few more get in, and
    are told the same by `Admission`.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The call's own handler, or one that refuses it."""
        if details.method != GENERATE or not self._completions.admission.is_full:
            return handler
        return begun_at_once(handler, self._refuse)

    # Not in the interceptor: whoever has no token is told that, and is no request.
    async def _refuse(self, _requests: Any, context: Context) -> None:
        self._completions.refuse(traceparent_of(context))

"""Refuses requests unread while no more may wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from coordinator.completions import Completions
from tandem.serving.edge import Context, Handler, begun_at_once, traceparent_of

GENERATE = "/tandem.v1.GenerationService/Generate"


class Door(grpc.aio.ServerInterceptor):
    """Lets requests in as long as there is room for another.

    In a rush every refusal stands in the way of the next. To read a request, only to refuse it, takes a third of the
    coordinator's time for it, so most are refused here; of those that come in the same moment a few more get in, and
    are told the same by `Admission`.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The call's own handler, or one that refuses it; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        is_open = handler_call_details.method != GENERATE or not self._completions.admission.is_full
        if handler is None or is_open:
            return handler
        return begun_at_once(handler, self._refuse)

    # Not in the interceptor: whoever has no token is told that, and is no request.
    async def _refuse(self, _requests: Any, context: Context) -> None:
        self._completions.refuse(traceparent_of(context))

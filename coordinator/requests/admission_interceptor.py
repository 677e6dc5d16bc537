"""Refuses requests unread while the queue is full."""

from __future__ import annotations

from typing import Any

import grpc

from coordinator.requests.large_requests import GENERATE
from coordinator.requests.runner import RequestRunner
from tandem.serving.interceptors.handlers import Context, Handler, Interceptor, begun_at_once, traceparent_of


class AdmissionInterceptor(Interceptor):
    """Admits requests as long as there is room for another.

    Under overload every refusal delays the next one. Reading a request that is then refused would take a third of the
    coordinator's time for it, so most are refused here. A few that arrive at the same moment still pass, and
    `Admission` refuses them.
    """

    def __init__(self, completions: RequestRunner) -> None:
        self._completions = completions

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The call's own handler, or one that refuses it."""
        if details.method != GENERATE or not self._completions.admission.is_full:
            return handler
        return begun_at_once(handler, self._refuse)

    # Not in the interceptor itself: a caller without a token gets another error, and does not count as a request.
    async def _refuse(self, _requests: Any, context: Context) -> None:
        self._completions.refuse(traceparent_of(context))

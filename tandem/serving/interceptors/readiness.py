"""Refuses calls while a server is loading or draining; health, reflection and administration always answer."""

from __future__ import annotations

import grpc

from tandem.errors import ServiceUnavailableError
from tandem.serving.interceptors.handlers import Handler, Interceptor, refusing

_ALWAYS_OPEN = ("/grpc.health.v1.", "/grpc.reflection.", "/tandem.v1.AdminService/")


class ReadinessInterceptor(Interceptor):
    """Lets calls through while `closed_because` is empty, else answers UNAVAILABLE with that reason."""

    def __init__(self, closed_because: str) -> None:
        self.closed_because = closed_because

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The call's own handler, or one that refuses it."""
        if not self.closed_because or details.method.startswith(_ALWAYS_OPEN):
            return handler
        return refusing(handler, ServiceUnavailableError(self.closed_because))

"""The error boundary of a server: turns errors of a handler into status codes, without internal details."""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import CapacityError, InvalidRequestError, TandemError, status_code
from tandem.serving.calls import RunningCalls
from tandem.serving.interceptors.handlers import (
    Behaviour,
    Context,
    Handler,
    Interceptor,
    behaviour_of,
    remade,
)
from tandem.serving.streams.slow_readers import SlowReaderWatchdog
from tandem.wire.status import Ending

logger = logging.getLogger(__name__)

Counted: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]

# Watchers of health and statistics stay for as long as the server does; a drain does not wait for them. Of a stream
# that sequences share, each sequence is counted.
_NOT_COUNTED = (
    "/grpc.health.v1.",
    "/tandem.v1.AdminService/",
    "/tandem.v1.DraftService/ProposeMany",
    "/tandem.v1.TargetService/VerifyMany",
)


def ended_by(error: Exception) -> Ending:
    """The status with which an error ends a stream, or a sequence on a shared stream.

    gRPC would send the text of any exception to the client. So an unexpected one is logged under an id, and the client
    receives only the id.
    """
    if isinstance(error, TandemError):
        retry_seconds = error.retry_after_seconds if isinstance(error, CapacityError) else None
        return Ending(status_code(error), str(error), retry_seconds)
    error_id = uuid.uuid4().hex[:12]
    logger.error("unexpected error", exc_info=error, extra={"error_id": error_id})
    return Ending(grpc.StatusCode.INTERNAL, f"internal error {error_id}; the server's log has the details")


def unreadable() -> InvalidRequestError:
    """Reason given for bytes that are no message."""
    return InvalidRequestError(
        "a message cannot be read; its bytes must be the protobuf that the method takes"
    )


@asynccontextmanager
async def errors_to_status(context: Context) -> AsyncIterator[None]:
    """End the call with the status code that the error in the block stands for."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # the last is gRPC's own word for a client that has gone away
    except Exception as error:  # noqa: BLE001 - the text of an unexpected error must not cross the network
        ending = ended_by(error)
        # A client that disconnects now is not an error.
        with suppress(grpc.aio.InternalError):
            await context.abort(ending.code, ending.sentence, ending.metadata)


class ErrorBoundary(Interceptor):
    """Stands before every method of a server: its errors, its unreadable requests, and readers that take nothing."""

    def __init__(self, calls: RunningCalls, stalled_reader_timeout_seconds: float | None = None) -> None:
        """Guard the methods of a server.

        Args:
            calls: Where to count the calls.
            stalled_reader_timeout_seconds: How long one message of a stream may wait for its reader. None: without end.
        """
        self._calls = calls
        self._readers = SlowReaderWatchdog(stalled_reader_timeout_seconds)

    def before(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Wrap the call's handler in the error boundary."""
        inner = behaviour_of(handler)
        counted = nullcontext if details.method.startswith(_NOT_COUNTED) else self._calls.running
        behaviour = (self._streaming if handler.response_streaming else self._single)(inner, counted)
        return remade(handler, behaviour, _lenient(handler.request_deserializer))

    def _single(self, inner: Behaviour, counted: Counted) -> Behaviour:
        async def answer(request: Any, context: Context) -> Any:
            async with errors_to_status(context), counted():
                return await inner(_readable(request), context)

        return answer

    def _streaming(self, inner: Behaviour, counted: Counted) -> Behaviour:
        is_generator = inspect.isasyncgenfunction(inner)

        # Writing here, not by yielding to gRPC, lets a cancelled call close its generator at once and in its own task.
        async def answer(request: Any, context: Context) -> None:
            async with errors_to_status(context), counted():
                if not is_generator:
                    await inner(_readable(request), context)
                    return
                async with aclosing(inner(_readable(request), context)) as responses:
                    with self._readers.reading() as reader:
                        async for response in responses:
                            # Returns once the flow control of HTTP/2 has let the message go, so a stream never queues
                            # more than one.
                            await reader.take(context.write(response))

        return answer


class _Unreadable:
    """Stands for a request whose bytes are not its message. gRPC would answer with a Python error, or UNKNOWN."""


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(content: bytes) -> Any:
        try:
            return deserialize(content)
        except DecodeError:
            return _Unreadable()

    return read


def _readable(request: Any) -> Any:
    """The request, or the stream of requests, that raises where one cannot be read."""
    return _Readable(request) if hasattr(request, "__aiter__") else _checked(request)


def _checked(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise unreadable()
    return request


class _Readable:
    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> _Readable:
        return self

    async def __anext__(self) -> Any:
        return _checked(await anext(self._requests))

"""Interceptors before the methods of a server: tokens, readiness, bounds, counts of calls, and the error boundary."""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    PermissionDeniedError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
    status_code,
)
from tandem.rpc.credentials import AUTHORIZATION
from tandem.serving.protection import Scope, Tokens, authorize, scope_of
from tandem.telemetry.logs import escape
from tandem.wire.bounds import check_bytes
from tandem.wire.status import Ending

_GONE_SECONDS = 5.0
"""A message that cannot be written is followed at once by the news that the call has ended."""


class SlowReaderWatchdog:
    """Ends streams whose reader takes nothing.

    One timer checks all of them now and then: an `asyncio.timeout` around each message took a twelfth of a
    coordinator's time with 16 requests.
    """

    def __init__(self, patience_seconds: float | None) -> None:
        """Allow one message `patience_seconds` to wait for its reader, or up to an eighth longer; None: forever."""
        self._patience = patience_seconds
        self._waits_since: dict[asyncio.Task[object], float] = {}
        self._stalled: set[asyncio.Task[object]] = set()
        self._next_look: asyncio.TimerHandle | None = None

    async def take(self, write: Awaitable[None], task: asyncio.Task[object] | None) -> None:
        """Wait until the reader of a stream has taken a message. The stream is that of the running task, which its
        caller looks up once: to look it up takes as long as to write a short message."""
        patience = self._patience
        if task is None or patience is None:
            await write
            return
        loop = task.get_loop()
        self._waits_since[task] = loop.time()
        if self._next_look is None:
            self._next_look = loop.call_later(patience / 8, self._look, loop, patience)
        try:
            await write
        except asyncio.CancelledError:
            if task not in self._stalled:
                raise
            task.uncancel()
            raise DeadlineError(
                f"the stream was not read for {patience:g} s; it was ended, read faster or ask for less"
            ) from None
        finally:
            del self._waits_since[task]
            self._stalled.discard(task)

    def _look(self, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        for task, since in self._waits_since.items():
            if since <= loop.time() - patience and task not in self._stalled:
                self._stalled.add(task)
                task.cancel()
        is_needed = bool(self._waits_since)
        self._next_look = loop.call_later(patience / 8, self._look, loop, patience) if is_needed else None


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Context], Any]

_MAKE_HANDLER = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Handler factories, by whether requests and responses are streams."""


Step: TypeAlias = Callable[[Handler, grpc.HandlerCallDetails], Handler]
"""Takes the handler of a call's method, and returns the one that answers this call: that or another."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The one interceptor of a server."""

    def __init__(self, *steps: Step) -> None:
        """Let each step stand before the method, the last before all others."""
        self._steps = steps

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is not None:
            for step in self._steps:
                handler = step(handler, handler_call_details)
        return handler


def behaviour_of(handler: Handler) -> Behaviour:
    """The function that a handler calls."""
    kinds: Any = handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream
    behaviour: Behaviour = next(filter(None, kinds))
    return behaviour


def remade(
    handler: Handler, behaviour: Behaviour, deserializer: Any = None, *, at_once: bool = False
) -> Handler:
    """Copy a method handler with another behaviour. `at_once`: it starts before the first request arrives, and takes
    requests as a stream. gRPC calls a method with a single request only once that has arrived, so a call that never
    sends it would stay."""
    make: Any = _MAKE_HANDLER[at_once or handler.request_streaming, handler.response_streaming]
    made: Handler = make(behaviour, deserializer or handler.request_deserializer, handler.response_serializer)
    return made


def refusing(handler: Handler, error: Exception) -> Handler:
    """Copy a method handler so that it raises an error at once."""

    async def refuse(_requests: Any, _context: Context) -> None:
        raise error

    return remade(handler, refuse, at_once=True)


def metadata_of(metadata: Any, name: str) -> str:
    """The value of a name in a call's metadata; empty where it has none."""
    value = next((value for key, value in metadata or () if key == name), "")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def traceparent_of(context: Context) -> str:
    """The W3C trace context that the client sent with the call; empty when it sent none."""
    return metadata_of(context.invocation_metadata(), "traceparent")


class RunningCalls:
    """The calls of a server: whether it takes another one, those that run, and how they end.

    Health checks are not among them, since their watchers stay as long as the server.
    """

    def __init__(self, closed_because: str = "", max_calls: int = 1 << 30) -> None:
        self.closed_because = closed_because
        """The reason why no new call is taken; empty while they are."""
        self._max_calls = max_calls
        self._tasks: set[asyncio.Task[object]] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()
        self._cut_by: TandemError | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def refuse_closed(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The step that answers UNAVAILABLE with the reason while no new call is taken."""
        if not self.closed_because or details.method.startswith(_ALWAYS_OPEN):
            return handler
        return refusing(handler, ServiceUnavailableError(self.closed_because))

    def check_room(self) -> None:
        """Refuse what counts as a call without being one."""
        if self.closed_because:
            raise ServiceUnavailableError(self.closed_because)
        if len(self) >= self._max_calls:
            raise CapacityError(f"{len(self)} calls run already, which is the most; try again")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count the task that runs the block as a call."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._none_runs.clear()
        try:
            yield
        except asyncio.CancelledError:
            if self._cut_by is None:
                raise
            task.uncancel()
            raise type(self._cut_by)(str(self._cut_by)) from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._none_runs.set()

    async def end(self, seconds: float) -> bool:
        """Wait for the end of all. False when some still run after that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._none_runs.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self, error: TandemError) -> int:
        """End all with an error; returns how many."""
        self._cut_by = error
        for task in self._tasks:
            task.cancel()
        return len(self)

    def reopen(self) -> None:
        """Take new calls again, once those that were cut off have ended."""
        self.closed_because = ""
        self._cut_by = None


_ALWAYS_OPEN = (
    "/grpc.health.v1.",
    "/grpc.reflection.",
    "/tandem.v1.AdminService/",
    "/tandem.v1.WeightsService/",
)


def authorizing(tokens: Callable[[], Tokens]) -> Step:
    """The step that holds each call to the tokens that the server knows."""

    def check_caller(handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        header = metadata_of(details.invocation_metadata, AUTHORIZATION)
        try:
            authorize(scope_of(details.method), header, tokens())
        except (UnauthenticatedError, PermissionDeniedError) as error:
            return refusing(handler, error)
        return handler

    return check_caller


MAX_WATCHERS = 128
"""Maximum Watch streams of health at once. A load balancer has one; other calls need the remaining places."""

MAX_MESSAGE_BYTES = 4 << 10
"""Maximum bytes of a message to a call without a token: it holds only the name of a service."""

# How long the one message of a call may take, which any client sends with the call itself.
MESSAGE_SECONDS = 10.0


class AnonymousCallLimiter:
    """Bounds the number of calls without a token, and ends those whose message does not arrive."""

    def __init__(self) -> None:
        self._watchers = 0

    def limit(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """The step that bounds a call which needs no token."""
        if scope_of(details.method) is not Scope.OPEN:
            return handler
        inner = behaviour_of(handler)
        place = self._place if handler.response_streaming else nullcontext

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            with place():
                return await inner(await _only(requests), context)

        return remade(handler, answer, partial(_small, handler.request_deserializer), at_once=True)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._watchers >= MAX_WATCHERS:
            raise CapacityError(
                f"{MAX_WATCHERS} watchers of health are there already, which is the most; use Check, or try again"
            )
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


def _small(read: Any, content: bytes) -> Any:
    """The message of these bytes. Its parts may be a million, so one that is too long is not parsed."""
    if len(content) > MAX_MESSAGE_BYTES:
        raise DecodeError(f"a message has {len(content)} bytes")
    return read(content)


async def _only(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineError(
            f"no message came for {MESSAGE_SECONDS:g} s; it must be sent with the call"
        ) from None
    except StopAsyncIteration:
        raise InvalidRequestError("the call ended without a message; it must have one") from None


logger = logging.getLogger(__name__)

# Watchers of health and statistics stay for as long as the server does; a drain does not wait for them. Of a stream
# that sequences share, each sequence is counted.
_NOT_COUNTED = (
    "/grpc.health.v1.",
    "/tandem.v1.AdminService/",
    "/tandem.v1.WeightsService/",
    "/tandem.v1.DraftService/Propose",
    "/tandem.v1.TargetService/Verify",
)


def ended_by(error: Exception) -> Ending:
    """The status with which an error ends a stream, or a sequence on a shared stream.

    gRPC would send the text of any exception to the client. So an unexpected one is logged under an id, and the client
    receives only the id.
    """
    if isinstance(error, TandemError):
        retry_seconds = error.retry_after_seconds if isinstance(error, CapacityError) else None
        # The sentence may quote what a caller sent.
        return Ending(status_code(error), escape(str(error)), retry_seconds)
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
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        # The client has gone away. gRPC cancels the call when it learns so; before that it would log a traceback.
        await asyncio.sleep(_GONE_SECONDS)
        raise
    except Exception as error:  # noqa: BLE001 - the text of an unexpected error must not cross the network
        ending = ended_by(error)
        # A client that disconnects now is not an error.
        with suppress(grpc.aio.InternalError):
            await context.abort(ending.code, ending.sentence, ending.metadata)


def guarding(calls: RunningCalls, stalled_reader_timeout_seconds: float | None = None) -> Step:
    """The step before every method: its errors, its unreadable requests, and readers that take nothing."""
    readers = SlowReaderWatchdog(stalled_reader_timeout_seconds)

    def guard(handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        inner = behaviour_of(handler)
        read = handler.request_deserializer or bytes
        # Messages are read within the boundary: of bytes that are none, gRPC would make a Python error, or UNKNOWN.
        if handler.request_streaming:
            requests_of = partial(_messages, read, _find_requests(details.method))
        else:
            requests_of = partial(_message, read)
        counted = nullcontext if details.method.startswith(_NOT_COUNTED) else calls.running

        async def answer(content: Any, context: Context) -> Any:
            async with errors_to_status(context), counted():
                called = inner(requests_of(content), context)
                if not inspect.isasyncgen(called):
                    return await called
                # Writing here, not by yielding to gRPC, lets a cancelled call close its generator at once and in its
                # own task.
                task = asyncio.current_task()
                async with aclosing(called) as responses:
                    async for response in responses:
                        # Returns once the flow control of HTTP/2 has let the message go, so a stream never queues more
                        # than one.
                        await readers.take(context.write(response), task)
            return None

        return remade(handler, answer, bytes)

    return guard


def _message(read: Callable[[bytes], Any], content: bytes) -> Any:
    try:
        return read(content)
    except DecodeError:
        raise unreadable() from None


def _find_requests(method: str) -> Descriptor | None:
    """The requests of a method; None for one without a protocol, whose messages are bytes."""
    try:
        found: Descriptor = (
            descriptor_pool.Default().FindMethodByName(method[1:].replace("/", ".")).input_type
        )
    except KeyError:
        return None
    return found


async def _messages(
    read: Callable[[bytes], Any], described: Descriptor | None, contents: AsyncIterator[bytes]
) -> AsyncIterator[Any]:
    async for content in contents:
        try:
            if described is not None:
                check_bytes(content, described)
        except ProtocolError as error:
            raise InvalidRequestError(str(error)) from None
        yield _message(read, content)

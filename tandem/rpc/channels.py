"""Channels to the services, and what gRPC's errors on them mean."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import CapacityError, ProtocolError, ServiceUnavailableError, TandemError, remote_error
from tandem.rpc.credentials import PLAIN, Credentials, attach_token
from tandem.telemetry.logs import escape
from tandem.wire.status import Ending, retry_after_seconds

DEFAULT_MESSAGE_LIMIT_BYTES = 4 << 20
"""gRPC's own limit."""


ChannelOptions = tuple[tuple[str, int | str], ...]


def _keepalive(interval_seconds: float, answer_seconds: float) -> ChannelOptions:
    """Detect a peer that neither answers nor closes the connection because it was stopped or unplugged: a connection
    that is silent for the interval is pinged, and counts as broken without an answer in time."""
    answer = round(1000 * answer_seconds)
    return (
        ("grpc.keepalive_time_ms", round(1000 * interval_seconds)),
        ("grpc.keepalive_timeout_ms", answer),
        # keepalive_timeout alone leaves a stopped peer unnoticed for a minute; this one governs.
        ("grpc.http2.ping_timeout_ms", answer),
    )


CLIENT_OPTIONS: ChannelOptions = (
    *_keepalive(5.0, 4.0),
    # A name with several addresses, or a list of them, is several coordinators: calls go to each in turn.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
)
"""For clients of coordinators, which may be many and far away."""
SERVICE_OPTIONS = _keepalive(1.2, 2.5)
"""Between a coordinator and its services: a stream of text pauses until a stopped target is noticed, for at most the
sum of both times. The interval is longer than that of health checks, so a service that answers those gets no pings. The
time for an answer allows for a machine short of processors; gRPC's own threads answer, however busy Python is."""

_CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A service that is starting is tried again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Despite its name, this bounds an attempt to connect, including the handshake.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A new channel connects at once, instead of waiting for the backoff of an old one to the same address.
    ("grpc.use_local_subchannel_pool", 1),
)

_MAX_LIMIT_BYTES = 2**31 - 1
"""gRPC keeps the limit in an int. What a target says of its vocabulary may come to more."""


def open_channel(
    address: str,
    message_limit_bytes: int = DEFAULT_MESSAGE_LIMIT_BYTES,
    credentials: Credentials = PLAIN,
    specific: ChannelOptions = CLIENT_OPTIONS,
) -> grpc.aio.Channel:
    """A channel to a service. Connects on first use."""
    channel: grpc.aio.Channel = _open(grpc.aio, address, credentials, message_limit_bytes, specific)
    return channel


def open_sync_channel(address: str, credentials: Credentials = PLAIN) -> grpc.Channel:
    """Open a blocking channel."""
    channel: grpc.Channel = _open(grpc, address, credentials, DEFAULT_MESSAGE_LIMIT_BYTES, CLIENT_OPTIONS)
    return channel


def _open(
    kind: Any, address: str, credentials: Credentials, message_limit_bytes: int, specific: ChannelOptions
) -> Any:
    options: list[tuple[str, int | str]] = [
        *specific,
        *_CHANNEL_OPTIONS,
        ("grpc.max_receive_message_length", min(message_limit_bytes, _MAX_LIMIT_BYTES)),
    ]
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    channel = (
        kind.secure_channel(address, credentials.channel_credentials(), options=options)
        if credentials.uses_tls
        else kind.insecure_channel(address, options=options)
    )
    _mark_unreadable_answers(channel)
    if (header := credentials.header()) is not None:
        attach_token(channel, header)
    return channel


class _UnreadableAnswer:
    """An answer that is not the protobuf of its method: reading any field of it raises a ProtocolError."""

    def __init__(self, method: str) -> None:
        self._method = method

    def __getattr__(self, name: str) -> NoReturn:
        raise ProtocolError(
            f"the answer to {self._method} cannot be read; it must be the protobuf of the method"
        )


def _mark_unreadable_answers(channel: grpc.aio.Channel | grpc.Channel) -> None:
    """Have all calls of a channel return an `_UnreadableAnswer` where they cannot parse what came.

    gRPC itself logs a traceback for it, and whoever awaits the answer gets None.
    """

    def marking(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_marking(
            method: str, *arguments: Any, response_deserializer: Any = None, **options: Any
        ) -> Any:
            def parse(content: bytes) -> Any:
                try:
                    return response_deserializer(content)
                except DecodeError:
                    return _UnreadableAnswer(method)

            own = None if response_deserializer is None else parse
            return make(method, *arguments, response_deserializer=own, **options)

        return make_marking

    for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, name, marking(getattr(channel, name)))


MeaningOf = Callable[[grpc.StatusCode], type[TandemError]]
"""The class of error that a status of the other end stands for."""


@contextmanager
def errors_of(service: str, meaning_of: MeaningOf = remote_error) -> Iterator[None]:
    """Raise gRPC errors of the block as ours, naming the service."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure(service, ending_of(error), meaning_of) from error


# grpc.aio raises this for a write after the end of the stream, and loses the service's status.
_BROKEN_WRITE = "Internal error from Core"


def ending_of(error: grpc.RpcError) -> Ending:
    """Status of the call that raised the error, awaited or not."""
    call = cast("grpc.Call", error)
    code = call.code()
    details = call.details() or ""
    if details == _BROKEN_WRITE:
        return Ending(grpc.StatusCode.UNAVAILABLE, "it ended the stream while it was written to")
    return Ending(code, details, retry_after_seconds(call.trailing_metadata() or ()))


def failure(service: str, ending: Ending, meaning_of: MeaningOf = remote_error) -> TandemError:
    """Return the error for a call, or for a sequence on a multiplexed stream, that ended like this; it names the
    service."""
    if ending.code is grpc.StatusCode.OK:
        return ServiceUnavailableError(f"{service}: it ended the stream")
    meaning = meaning_of(ending.code)
    sentence = f"{service}: {escape(ending.sentence) or ending.code.name.lower()}"
    if meaning is CapacityError:
        return CapacityError(sentence, ending.retry_after_seconds)
    return meaning(sentence)


def message_limit(vocabulary_size: int, row_count: int) -> int:
    """Maximum bytes of a message: room for that many dense rows, plus gRPC's own default."""
    return vocabulary_size * 4 * row_count + DEFAULT_MESSAGE_LIMIT_BYTES


class Deadline:
    """A deadline so many seconds from now, or none."""

    def __init__(self, seconds: float | None) -> None:
        self._moment = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Remaining seconds, at least 0; None without a deadline."""
        return None if math.isinf(self._moment) else self.at_most(math.inf)

    def at_most(self, seconds: float) -> float:
        return min(seconds, max(0.0, self._moment - time.monotonic()))


@dataclass(frozen=True, slots=True)
class MessageWaits:
    """Receives how long the messages of a shared stream wait in this process, in seconds each."""

    answer: Callable[[float], None]
    """From reading an answer until its sequence goes on."""
    question: Callable[[float], None]
    """From a sequence's question until its message is written."""


@dataclass(slots=True)
class Traffic:
    """Bytes sent and received for one sequence: serialized messages without framing."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    waits: MessageWaits | None = None
    """None: nobody measures."""


class _ReadEnd(socket.socket):
    """Reads all bytes that there are, however few are asked for. Whoever reads them handles all events before them."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(max(bufsize, 1 << 16), flags)  # more than the socket holds


def read_all_wake_ups() -> None:
    """Keep gRPC's events coming while there are more of them than turns of the event loop.

    For each event, a thread of `grpc.aio` writes a byte to a socket, which wakes the event loop; the loop then reads
    one byte and handles all events that there are. Under load a turn handles many events, so bytes pile up. Once there
    are 278, Linux lets the thread write again only after three quarters of them were read, and until then no event of
    the whole process arrives: 0.6 to 1.0 s, beside 64 clients that send large prompts. Here the loop reads all bytes.

    Call this on the event loop, before anything else of `grpc.aio` is used; later it has no effect.
    """
    own_pair = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        read_end, write_end = own_pair()
        return _ReadEnd(read_end.family, read_end.type, read_end.proto, read_end.detach()), write_end

    # gRPC offers no other way to the sockets, which it makes here, and which live as long as anything uses `grpc.aio`.
    socket.socketpair = pair  # type: ignore[assignment]
    try:
        grpc.aio.init_grpc_aio()
    finally:
        socket.socketpair = own_pair

"""How many bytes a stream carried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio


@dataclass(slots=True)
class Traffic:
    """What went over one stream, counted in serialized messages without gRPC's framing."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0


class CountingChannel:
    """A channel whose bidirectional streams count what they carry; for a generated stub.

    The sizes are those of the bytes that are serialized anyway. `ByteSize` would serialize each message once more,
    which takes milliseconds for rows with whole distributions.
    """

    def __init__(self, channel: grpc.aio.Channel, traffic: Traffic) -> None:
        self._channel = channel
        self._traffic = traffic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **options: Any,
    ) -> grpc.aio.StreamStreamMultiCallable[Any, Any]:
        """As the channel's own."""
        traffic = self._traffic

        def serialize(message: Any) -> bytes:
            content = request_serializer(message)
            traffic.sent_bytes += len(content)
            traffic.sent_messages += 1
            return content

        def deserialize(content: bytes) -> Any:
            traffic.received_bytes += len(content)
            traffic.received_messages += 1
            return response_deserializer(content)

        return self._channel.stream_stream(method, serialize, deserialize, **options)


def counted(channel: grpc.aio.Channel, traffic: Traffic | None) -> Any:
    """The channel, counting when there is something to count in."""
    return channel if traffic is None else CountingChannel(channel, traffic)

"""The end of a stream, or of a sequence on it.

Details of a status beyond its code and message travel as google.rpc.Status in a trailing header, gRPC's usual form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tandem.v1 import types_pb2

# gRPC's own name for the header (googleapis, google/rpc/status.proto).
_DETAILS = "grpc-status-details-bin"

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Ending:
    """Status with which a stream or a sequence ended."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    sentence: str = ""
    """The error."""
    retry_after_seconds: float | None = None
    """Seconds after which a retry is worthwhile; None when unknown."""

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        if self.retry_after_seconds is None:
            return ()
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(self.retry_after_seconds * 1000))
        status = status_pb2.Status(code=self.code.value[0], message=self.sentence)
        status.details.add().Pack(retry)
        return ((_DETAILS, status.SerializeToString()),)


def write_ending(message: types_pb2.Ending, ending: Ending) -> None:
    """Write the end of a sequence on a stream that continues."""
    message.code = ending.code.value[0]
    message.message = ending.sentence
    if ending.retry_after_seconds is not None:
        message.retry_after_seconds = ending.retry_after_seconds


def read_ending(message: types_pb2.Ending) -> Ending:
    """The end of a sequence, from the peer's message; a code that gRPC does not have is UNKNOWN."""
    return Ending(
        _CODES.get(message.code, grpc.StatusCode.UNKNOWN),
        message.message,
        message.retry_after_seconds if message.HasField("retry_after_seconds") else None,
    )


def retry_after_seconds(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Seconds after which a retry is worthwhile; None where the metadata does not say."""
    content = next((value for key, value in metadata if key == _DETAILS), None)
    if not isinstance(content, bytes):
        return None
    retry = error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(content).details:
            if detail.Unpack(retry):
                seconds: float = retry.retry_delay.ToTimedelta().total_seconds()
                return seconds
    except DecodeError:
        pass  # not ours to complain of: the code and the sentence say enough
    return None

"""What a status says beyond its code and sentence: google.rpc.Status in a trailing header, as all of gRPC reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

# gRPC's own name for the header (googleapis, google/rpc/status.proto).
_DETAILS = "grpc-status-details-bin"


def retry_metadata(code: int, message: str, retry_after_seconds: float) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata of a refusal that says when it is worth another try."""
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(math.ceil(retry_after_seconds * 1000))
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(retry)
    return ((_DETAILS, status.SerializeToString()),)


def retry_after_seconds(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """When it is worth another try; None where the metadata does not say."""
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

"""The meaning of each status of a draft or target service for the coordinator.

No status of a service is the request's own: all of them mean "elsewhere". A deadline of the request is known here, and
a service that says DEADLINE_EXCEEDED speaks of some other one. Only where no other target goes on does the client
learn anything, and then in the coordinator's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import grpc

from tandem.errors import (
    CapacityError,
    InvalidRequestError,
    PermissionDeniedError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)
from tandem.rpc import channels
from tandem.wire.status import Ending

MEANINGS: Mapping[grpc.StatusCode, type[TandemError]] = {
    # It goes: nothing new is sent there until it answers for itself.
    grpc.StatusCode.OK: ServiceUnavailableError,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailableError,
    # It has no room: it stays ready, since it may have room for the next sequence.
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    # It refuses the request, which the coordinator has checked. If another target takes it, this one has erred.
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    # It refuses the coordinator's token.
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    # A service of ours has no reason to say these: it has a defect, or something between speaks in its place.
    grpc.StatusCode.CANCELLED: ProtocolError,
    grpc.StatusCode.UNKNOWN: ProtocolError,
    grpc.StatusCode.DEADLINE_EXCEEDED: ProtocolError,
    grpc.StatusCode.NOT_FOUND: ProtocolError,
    grpc.StatusCode.ALREADY_EXISTS: ProtocolError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolError,
    grpc.StatusCode.ABORTED: ProtocolError,
    grpc.StatusCode.OUT_OF_RANGE: ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.INTERNAL: ProtocolError,
    grpc.StatusCode.DATA_LOSS: ProtocolError,
}


def failure(service: str, ending: Ending) -> TandemError:
    """The error for a sequence that a service, or its stream, has ended like this; it names the service."""
    return channels.failure(service, ending, MEANINGS.__getitem__)


def errors_of(service: str) -> AbstractContextManager[None]:
    """Raise gRPC errors of the block as ours, naming the service."""
    return channels.errors_of(service, MEANINGS.__getitem__)

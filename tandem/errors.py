"""One exception tree; each branch maps to one gRPC status code.

    TandemError                  INTERNAL
    ├── InvalidRequestError      INVALID_ARGUMENT      the request can never succeed
    │   └── NotFoundError        NOT_FOUND             a named object does not exist
    ├── UnauthenticatedError     UNAUTHENTICATED       the caller's token is missing or wrong
    ├── PermissionDeniedError    PERMISSION_DENIED     the caller lacks the permission
    ├── CapacityError            RESOURCE_EXHAUSTED    it may succeed later
    ├── ServiceUnavailableError  UNAVAILABLE           a service is gone, draining or not ready
    ├── DeadlineError            DEADLINE_EXCEEDED     the deadline has passed
    ├── AbortedError             ABORTED               an administrator ended the request
    ├── ProtocolError            INTERNAL              a peer broke the protocol
    ├── NonFiniteLogitsError     INTERNAL              logits are not finite; exit code 1 at the start
    └── ConfigurationError       FAILED_PRECONDITION   the configuration is invalid; exit code 2
        ├── ModelFolderError                           a checkpoint cannot be served; exit code 1
        └── IncompatibleModelsError                    draft and target do not match

Messages are one sentence for a user: what was wrong, what it was and what it should be. They may cross the network.
"""

from __future__ import annotations

import grpc


class TandemError(Exception):
    """Anything that Tandem raises on purpose."""


class InvalidRequestError(TandemError):
    """The request breaks a rule and would break it again."""


class NotFoundError(InvalidRequestError):
    """The request names something that is not there."""


class UnauthenticatedError(TandemError):
    """The caller shows no token, or one that is not known."""


class PermissionDeniedError(TandemError):
    """The caller is known, but lacks the permission."""


class CapacityError(TandemError):
    """There is no room for the request now."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """Seconds after which a retry is worthwhile; None when unknown."""


class ServiceUnavailableError(TandemError):
    """A service that is needed cannot be reached, is draining, or is not ready."""


class DeadlineError(TandemError):
    """The request took longer than it was allowed to."""


class AbortedError(TandemError):
    """An administrator ended the request."""


class ProtocolError(TandemError):
    """A peer broke the protocol: it has a defect or another version."""


class NonFiniteLogitsError(TandemError):
    """A model's logits are NaN or infinite: there is no distribution to choose a token from."""


class ConfigurationError(TandemError):
    """The process cannot start as it is set up."""


class ModelFolderError(ConfigurationError):
    """A folder does not hold a checkpoint that can be served."""


class IncompatibleModelsError(ConfigurationError):
    """The draft's model and the target's do not go together."""


_STATUS_CODES: dict[type[TandemError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ServiceUnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    AbortedError: grpc.StatusCode.ABORTED,
    ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
    TandemError: grpc.StatusCode.INTERNAL,
}


def status_code(error: TandemError) -> grpc.StatusCode:
    """The gRPC status code of the nearest branch of the tree that `error` belongs to."""
    return next(_STATUS_CODES[cls] for cls in type(error).__mro__ if cls in _STATUS_CODES)


_REMOTE_ERRORS = {
    code: cls for cls, code in _STATUS_CODES.items() if cls not in (TandemError, ConfigurationError)
}


def remote_error(code: grpc.StatusCode) -> type[TandemError]:
    """The class of error that a call ended with at its other end; ProtocolError where that end should not end so."""
    return _REMOTE_ERRORS.get(code, ProtocolError)


def plural(count: int, noun: str) -> str:
    """1 token, 1024 tokens: numbers in a message are those of the options."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

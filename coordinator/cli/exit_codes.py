"""Exit codes of the `tandem` command.

0 ok    1 failed    2 usage    3 unhealthy    4 unreachable    5 refused
"""

from __future__ import annotations

from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    ModelFolderError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)

OK = 0
FAILED = 1
USAGE = 2
UNHEALTHY = 3
UNREACHABLE = 4
REFUSED = 5

_EXIT_CODES: tuple[tuple[type[TandemError], int], ...] = (
    (ModelFolderError, FAILED),
    (ConfigurationError, USAGE),
    (ServiceUnavailableError, UNREACHABLE),
    (InvalidRequestError, REFUSED),
    (UnauthenticatedError, REFUSED),
    (PermissionDeniedError, REFUSED),
    (CapacityError, REFUSED),
    (TandemError, FAILED),
)


def exit_code(error: TandemError) -> int:
    """The exit code for a kind of failure."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))

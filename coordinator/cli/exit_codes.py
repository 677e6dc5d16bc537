"""Exit codes of the `tandem` command.

0 ok    1 failed    2 usage    3 unhealthy    4 unreachable    5 refused
"""

from __future__ import annotations

from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)

_EXIT_CODES: tuple[tuple[type[TandemError], int], ...] = (
    (ConfigurationError, 2),
    (ServiceUnavailableError, 4),
    (InvalidRequestError, 5),
    (UnauthenticatedError, 5),
    (PermissionDeniedError, 5),
    (CapacityError, 5),
    (TandemError, 1),
)


def exit_code(error: TandemError) -> int:
    """The exit code that tells a script what kind of failure this was."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))

"""stdin, stdout and stderr, which may be closed, on a full device or on a terminal that is gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Literal, TextIO

from tandem.errors import TandemError


class OutputError(TandemError):
    """Stdout cannot be written."""


def fill_closed() -> None:
    """Open the null device in place of each standard stream that is closed.

    The system assigns the lowest free number, so without this the next socket would get a standard stream's number, and
    output would go over the network. libuv aborts the process when it finds such a socket. A closed stdout is an error,
    since a server's address or a command's result would be lost.
    """
    has_stdout = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or _open(0, "r")
    sys.stdout = sys.stdout or _open(1, "w")
    sys.stderr = sys.stderr or _open(2, "w")
    if not has_stdout:
        raise OutputError("stdout is closed; it must be open, for example on /dev/null")


def _open(number: int, mode: Literal["r", "w"]) -> TextIO:
    return open(number, mode, encoding="utf-8", closefd=False)


def write_out(text: str) -> None:
    """Write to stdout at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise unwritable(error) from None


def unwritable(error: OSError) -> OutputError:
    """The sentence for an error of a write to stdout.

    Drops what stdout still holds in its buffer: Python would try to write it again when the process ends, fail again
    and report that with a traceback.
    """
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputError(f"stdout cannot be written: {(error.strerror or str(error)).lower()}")


def write_error(text: str) -> None:
    """Write to stderr at once; if that fails, nothing else can be done."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def exit_with(error: Exception, code: int) -> None:
    """End the process with one sentence on stderr."""
    write_error(f"error: {error}\n")
    sys.exit(code)

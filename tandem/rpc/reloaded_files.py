"""Files that are read again when they change: certificates and tokens are renewed while a process runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

# Identifies a version of a file: a renewal replaces the file, or the folder behind a link.
_Version = tuple[tuple[int, int, int], ...]


class ReloadedFile(Generic[ValueT]):
    """A value made from files, and made again when one of them has changed.

    A new version that is missing, cannot be read or makes no sense is logged once, and the last good one stays: a
    renewal is seldom atomic over two files.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[Sequence[bytes]], ValueT]) -> None:
        """Read the files for the first time.

        Args:
            paths: The files.
            make: The value, from their contents. Raises ConfigurationError when they make no sense.

        Raises:
            ConfigurationError: a file cannot be read, or `make` refuses.
        """
        self._paths = paths
        self._make = make
        try:
            self._version: _Version | None = self._look()
            self._value = self._read()
        except OSError as error:
            raise ConfigurationError(f"{error.filename} cannot be read: {_reason(error)}") from None

    @property
    def value(self) -> ValueT:
        """Current content of the files."""
        try:
            self._renew()
        except OSError as error:
            logger.warning("file not readable; the last version stays",
                           extra={"files": self._names, "error": _reason(error)})  # fmt: skip
        except ConfigurationError as error:
            logger.warning("renewed file refused; the last version stays",
                           extra={"files": self._names, "error": str(error)})  # fmt: skip
        return self._value

    def _renew(self) -> None:
        try:
            version = self._look()
        except OSError:
            if self._version is None:
                return  # it was missing before, which has been logged
            self._version = None
            raise
        if version != self._version:
            self._version = version
            self._value = self._read()
            logger.info("files renewed", extra={"files": self._names})

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._paths))

    def _look(self) -> _Version:
        stats = [path.stat() for path in self._paths]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _read(self) -> ValueT:
        return self._make([path.read_bytes() for path in self._paths])


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()

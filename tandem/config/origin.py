"""Where the value of an option comes from."""

from __future__ import annotations

from enum import StrEnum


class Origin(StrEnum):
    """Origins of a value, the strongest first."""

    LIVE = "live"
    """An administrator set it while the process ran."""
    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    FILE = "file"
    INFERRED = "inferred"
    DEFAULT = "default"

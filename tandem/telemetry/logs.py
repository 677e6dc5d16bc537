"""Structured logs on stderr: one line an event, a message and its fields.

logger = logging.getLogger(__name__)
logger.info("sequence opened", extra={"request_id": request_id, "prompt_tokens": 12})
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Attributes of every record
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: LogLevel, log_format: LogFormat) -> None:
    """Send every logger of this process to stderr in one format. Called once, by a process's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_of(log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries' own progress and debug lines are not events of ours.
    for name in ("grpc", "transformers", "torch", "asyncio", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    """Writes events in this format."""
    return _JsonFormatter() if log_format == "json" else _TextFormatter()


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """An event's own fields, without those of every record."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def log_fault(logger: logging.Logger, event: str, error: Exception, **fields: object) -> None:
    """Log an unexpected error that a loop outlives, in a line: its kind, its words, and the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    logger.log(logging.ERROR, event, extra={**fields, "error": f"{type(error).__name__}: {error}{where}"})


# Controls, separators of lines, marks that reverse the direction of text, and halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape(text: str) -> str:
    """The text without characters that begin a line, speak to a terminal or hide others, as escapes that JSON has too.

    Peers choose words of some events: a line of the log is one event, whatever they said.
    """
    return _UNPRINTABLE.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def _event(record: logging.LogRecord) -> dict[str, object]:
    return {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
        **fields_of(record),
    }


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = _event(record)
        head = f"{event.pop('time')} {event.pop('level'):<7} {event.pop('logger')}: {event.pop('message')}"
        tail = "".join(f" {name}={_word(value)}" for name, value in event.items())
        line = escape(head + tail)
        if record.exc_info:
            # Indented: an exception's words cannot pass for an event either
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n  {escape(each)}" for each in trace)
        return line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = _event(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return escape(json.dumps(event, default=str, ensure_ascii=False))


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c == '"' for c in text) else text

"""Structured logs on stderr: one line an event, a message and its fields.

logger = logging.getLogger(__name__)
logger.info("sequence opened", extra={"request_id": request_id, "prompt_tokens": 12})
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Attributes of every record
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: LogLevel, log_format: LogFormat) -> None:
    """Send every logger of this process to stderr in one format. Called once, by a process's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries' own progress and debug lines are not events of ours.
    for name in ("grpc", "transformers", "torch", "asyncio", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """An event's own fields, without those of every record."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


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
        return head + tail + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = _event(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c == '"' for c in text) else text

"""A log line is one event with its fields, in words or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from tandem.logs import configure


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text")
    logging.getLogger("tandem.x").info(
        "draft lost", extra={"seconds": 0.25, "error": "gone away", "empty": ""}
    )
    line = capsys.readouterr().err
    assert line.endswith(' info    tandem.x: draft lost seconds=0.25 error="gone away" empty=""\n')


def test_json_with_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("tandem.x").exception("step failed", extra={"sequences": 3})
    event = json.loads(capsys.readouterr().err)
    assert (event["level"], event["logger"], event["message"]) == ("error", "tandem.x", "step failed")
    assert event["sequences"] == 3
    assert "ValueError: odd" in event["exception"]


def test_less_severe_lines_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", "text")
    logging.getLogger("tandem.x").info("detail")
    assert capsys.readouterr().err == ""

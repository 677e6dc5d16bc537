"""Progress: a bar in a terminal, which vanishes; elsewhere a line now and then, and none for what is soon over."""

from __future__ import annotations

import io
import re
import threading

import pytest

from tandem.telemetry import progress
from tandem.telemetry.progress import Progress

WAIT_SECONDS = 30.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_which_vanishes() -> None:
    terminal = Terminal()
    with Progress("tandem audit", terminal) as shown:
        shown.show("sampling [1] tokens")
        shown.show("sampling [1] tokens", 0.5)
        shown._bar.refresh()
    text = terminal.getvalue()
    assert "sampling [1] tokens" in text
    assert "━" in text
    assert "tandem audit" not in text
    assert text.endswith("\x1b[2K"), "the line is erased"


class Log(io.StringIO):
    """Wakes up whoever waits for a line with a share."""

    def __init__(self) -> None:
        super().__init__()
        self.has_line = threading.Event()
        self.has_share = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.has_line.set()
        if "40%" in text:
            self.has_share.set()
        return count


def test_elsewhere_there_is_a_line_at_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    log = Log()
    with Progress("tandem target", log) as shown:
        shown.show("loading m")
        assert log.has_line.wait(WAIT_SECONDS)
        shown.show("warming up", 0.4)
        assert log.has_share.wait(WAIT_SECONDS)
    lines = log.getvalue().splitlines()
    assert re.fullmatch(r"tandem target: loading m after \d+ s", lines[0])
    assert re.fullmatch(r"tandem target: warming up, 40% done after \d+ s", lines[-1])


def test_what_is_soon_over_leaves_no_line() -> None:
    stream = io.StringIO()
    with Progress("tandem audit", stream) as shown:
        shown.show("asking")
    assert stream.getvalue() == ""
    assert progress.LINE_SECONDS == 10.0


class Gone(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.tried = threading.Event()

    def write(self, _: str) -> int:
        self.tried.set()
        raise BrokenPipeError


def test_a_reader_that_is_gone_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    stream = Gone()
    with Progress("tandem audit", stream) as shown:
        shown.show("asking")
        assert stream.tried.wait(WAIT_SECONDS)

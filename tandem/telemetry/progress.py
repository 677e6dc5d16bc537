"""Progress of work that takes more than a few seconds: a bar in a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Self, TextIO

LINE_SECONDS = 10.0
"""Between two lines outside a terminal: work that takes no longer leaves none in a log."""


class Progress:
    """Shows which work a program does and how much of it is done, for as long as the `with` block takes.

    A bar vanishes with the block. Its width is unknown until a share is shown: it moves to and fro until then.
    """

    def __init__(self, program: str, stream: TextIO) -> None:
        """The program's name begins each line. The stream has the bar if it is a terminal, and otherwise the lines."""
        self._program = program
        self._stream = stream
        self._words = ""
        self._share: float | None = None
        self._began = time.monotonic()
        self._has_ended = threading.Event()
        self._bar: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to show it, as the `with` block does."""
        if self._stream.isatty():
            self._bar = _bar_on(self._stream)
            self._bar.start()
        else:
            threading.Thread(target=self._write_lines, name="tandem-progress", daemon=True).start()

    def stop(self) -> None:
        """Show nothing any more, and remove the bar."""
        self._has_ended.set()
        if self._bar is not None:
            self._bar.stop()

    def show(self, words: str, share: float | None = None) -> None:
        """Say what is being done now, and which share of all is done; None where nobody knows."""
        self._words = words
        self._share = share
        if self._bar is None:
            return
        if not self._bar.tasks:
            self._bar.add_task(words, total=None)
        total = None if share is None else 1.0
        self._bar.update(self._bar.task_ids[0], description=words, total=total, completed=share or 0.0)

    @property
    def line(self) -> str:
        """The work in progress, as a line says it."""
        done = "" if self._share is None else f", {self._share:.0%} done"
        return f"{self._program}: {self._words}{done} after {time.monotonic() - self._began:.0f} s\n"

    def _write_lines(self) -> None:
        while not self._has_ended.wait(LINE_SECONDS):
            if self._words:
                # The work itself notices that nobody reads any more.
                with suppress(OSError, ValueError):
                    self._stream.write(self.line)
                    self._stream.flush()


def _bar_on(stream: TextIO) -> Any:
    # Imported here: services load it in a terminal alone.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn()
    return Bars(*columns, console=Console(file=stream, highlight=False), transient=True)

"""Progress of an audit: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0
"""Between two lines outside a terminal: an audit that takes no longer leaves none in a log."""

Report = Callable[[str, float], None]
"""Is told what is being done, and which share of all is done."""


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Report]:
    """Show on a stream what is reported, for as long as the `with` block takes; a bar vanishes with it."""
    if not stream.isatty():
        yield _lines(stream)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream, highlight=False), transient=True) as bars:
        task = bars.add_task("connecting", total=1.0)

        def report(words: str, share: float) -> None:
            bars.update(task, description=words, completed=share)

        yield report


def _lines(stream: TextIO) -> Report:
    began = time.monotonic()
    last = began

    def report(words: str, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_SECONDS:
            return
        last = now
        # The audit goes on where nobody reads any more.
        with suppress(OSError, ValueError):
            stream.write(f"tandem-audit: {words}, {share:.0%} done after {now - began:.0f} s\n")
            stream.flush()

    return report

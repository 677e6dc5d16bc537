"""The signals that end a process: the first one in order, the second one at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

logger = logging.getLogger(__name__)


@contextmanager
def stop_signals(before_end: Callable[[], None] = lambda: None) -> Iterator[asyncio.Event]:
    """An event that SIGTERM, SIGINT and SIGHUP set. A further SIGTERM or SIGINT ends the process at once.

    A terminal that closes sends SIGHUP, and its shell may send it again, so a further one is no sign of impatience.
    SIGHUP stays ignored where it was ignored at the start: that is what nohup asks for.

    Args:
        before_end: Called before the process ends at once.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if stopping.is_set() and number != signal.SIGHUP:
            logger.warning("second signal; nothing more is waited for", extra={"signal": number})
            before_end()
            end_now(128 + number)  # as shells report a death by a signal
        stopping.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def end_now(code: int) -> NoReturn:
    """End the process without the interpreter's own end, which waits for threads and may abort because of them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)

"""Loading that takes seconds and cannot be interrupted, beside an event loop that stays responsive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_daemon_thread(load: Callable[[], ResultT]) -> ResultT:
    """Await `load` in a daemon thread and return its result.

    Unlike a thread of the loop's own pool this one holds up neither the loop's end nor the process's.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = load()
        except Exception as raised:  # noqa: BLE001 - the waiting caller gets any error
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="tandem-load", daemon=True).start()
    return await future

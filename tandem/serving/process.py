"""A service's process, from its command line to its exit code."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import uvloop

from tandem.errors import ConfigurationError, ModelFolderError, TandemError
from tandem.logs import configure
from tandem.serving.server import Service, end_now, serve
from tandem.settings import ServerSettings, load_settings
from tandem.standard_streams import exit_with, fill_closed

YOUNG_OBJECTS = 10_000
"""New objects, less those that were freed, after which the collector looks at them. With Python's default of 700 a
coordinator collects hundreds of times a second and finds nothing, since rounds leave no cycles: a tenth of its time
(docs/measurements.md)."""


def set_start_aside() -> None:
    """Exempt all present objects from later collections.

    A service that has imported torch and loaded its model holds some 400,000 objects for its whole life. A full
    collection visits all of them while every request waits: 0.2 to 0.3 s in a target or draft service, 0.03 to 0.05 s
    in a coordinator (docs/measurements.md). Present garbage is collected first, since it would stay forever. Later
    collections come more rarely (`YOUNG_OBJECTS`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


ResultT = TypeVar("ResultT")


async def in_daemon_thread(load: Callable[[], ResultT]) -> ResultT:
    """Await `load` in a daemon thread and return its result.

    Unlike a thread of the loop's own pool this one holds up neither the loop's end nor the process's.
    """
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it from now on

    def work() -> None:
        try:
            future.set_result(load())
        except Exception as error:  # noqa: BLE001 - the waiting caller gets any error
            future.set_exception(error)

    threading.Thread(target=work, name="tandem-load", daemon=True).start()
    return await asyncio.wrap_future(future)


SettingsT = TypeVar("SettingsT", bound=ServerSettings)


def main(
    settings_class: type[SettingsT],
    make_service: Callable[[SettingsT], Service],
    arguments: Sequence[str],
    program: str,
) -> None:
    """Serve until a signal ends it.

    Exits 0 after a drain, 2 when the process cannot run as its options are, 1 on any other failure that has a name: a
    model folder that cannot be served, a model that computes no numbers, an engine that failed.
    """
    with exit_codes():
        fill_closed()
        settings = load_settings(settings_class, arguments, program)
        configure(settings.log_level, settings.log_format)
        uvloop.run(_serve_to_the_end(settings, make_service(settings)))


async def _serve_to_the_end(settings: ServerSettings, service: Service) -> None:
    """Serve, and end the process at once: everything is closed by then.

    The event loop's and the interpreter's own ends wait for tasks and threads: a model may still be being read on
    another thread, in code that does not survive them.
    """
    await serve(settings, service, before_ready=set_start_aside)
    end_now(0)


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the process with a sentence and an exit code when the block raises an error that has a name. See `main`."""
    try:
        yield
    except TandemError as error:
        is_setup = isinstance(error, ConfigurationError) and not isinstance(error, ModelFolderError)
        exit_with(error, 2 if is_setup else 1)

"""A service's process, from its command line to its exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import uvloop

from tandem.errors import ConfigurationError, ModelFolderError, TandemError
from tandem.logs import configure
from tandem.serving.heap import set_start_aside
from tandem.serving.server import Service, serve
from tandem.serving.signals import end_now
from tandem.settings import ServerSettings, exit_with, load_settings
from tandem.standard_streams import fill_closed

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
        was_ready = uvloop.run(serve(settings, make_service(settings), before_ready=set_start_aside))
    if not was_ready:
        # A model is still being read on another thread, in code that does not survive the interpreter's end.
        end_now(0)


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the process with a sentence and an exit code when the block raises an error that has a name. See `main`."""
    try:
        yield
    except ModelFolderError as error:
        exit_with(error, 1)
    except ConfigurationError as error:
        exit_with(error, 2)
    except TandemError as error:
        exit_with(error, 1)

"""Settings of all tests."""

import gc
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tandem.serving.server import STARTING_OBJECTS, set_start_aside
from tests.end_to_end.processes import WARM_UP_SECONDS, nursery

gc.set_threshold(STARTING_OBJECTS)
# No test asserts a time, and a busy machine may pause any example. Each run draws other examples.
settings.register_profile("tests", settings(), deadline=None, max_examples=50)
settings.load_profile("tests")

# Children inherit ignored signals, but not handlers. A shell starts background jobs with SIGINT ignored, and nohup
# ignores SIGHUP: services that the tests start would not heed these signals either.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


_TOGETHER = [Path(__file__).parent / name for name in ("end_to_end", "deploy")]
"""Folders whose files share what they start: services and the nursery that forks them, and what is built."""


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each of these folders to one process."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = config.rootpath / super()._split_scope(nodeid)
            return str(file.parent if file.parent in _TOGETHER else file)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give soak tests no timeout; any other test that takes minutes hangs. What stays together comes first.

    The last ones to begin are then short, so that no process waits long for another at the end.
    """
    items.sort(key=lambda item: item.path.parent not in _TOGETHER)  # stable: the rest stays in order
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """Exempt what was imported from garbage collection, as services do: a full one visits all objects of torch.

    Engines prepare and measure only small steps, as those of the nursery.
    """
    if engine := sys.modules.get("tandem.engine.core.engine"):
        vars(engine)["WARM_UP_SECONDS"] = WARM_UP_SECONDS
    set_start_aside()


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Give logs back to pytest: a process's main sends them to its stderr, which in a test is closed at its end."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_sessionfinish() -> None:
    """End the nursery of services, if there is one."""
    if nursery.cache_info().currsize:
        nursery().close()

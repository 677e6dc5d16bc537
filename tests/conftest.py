"""What holds for all tests."""

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what it puts in the background, and processes hand it on: Ctrl-C would do nothing to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Soak tests take as long as they take; any other that takes minutes hangs."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(0))

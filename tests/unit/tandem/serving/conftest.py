"""Fixtures that tests of servers share."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port

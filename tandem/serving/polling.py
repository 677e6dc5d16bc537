"""Makes one thread wait for sockets. This must be set before gRPC is imported, so this module does not import it."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
_NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
"""gRPC's own names. With its event engine, other threads wait for sockets and pass data to the thread in which
`grpc.aio`
waits: each message wakes one more thread, at each end. Without it, that thread waits for the sockets itself.
docs/measurements.md has the measurements."""


def wait_in_one_thread() -> None:
    """Makes gRPC of this process and its children wait for sockets where results are waited for, unless the environment
    says which experiments of gRPC are on."""
    os.environ.setdefault(_VARIABLE, _NO_EVENT_ENGINE)

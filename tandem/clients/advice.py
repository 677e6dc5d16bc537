"""Adds the next step to errors of a call to a coordinator, where it is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import ServiceUnavailableError
from tandem.rpc.channels import errors_of

# What gRPC says where an HTTP/1 server answers: the first bytes are no frame of HTTP/2.
_SPEAKS_HTTP = ("Expected SETTINGS frame as the first frame", "connect an http1.x server")
_REFUSED = "Connection refused"


@contextmanager
def coordinator_errors(address: str) -> Iterator[None]:
    """Raise gRPC errors of the block as ours, naming the coordinator and the next step.

    Raises:
        TandemError: the branch of the tree that the status code stands for.
    """
    try:
        with errors_of(f"coordinator {address}"):
            yield
    except ServiceUnavailableError as error:
        advice = advice_on(str(error))
        if advice is None:
            raise
        raise ServiceUnavailableError(f"coordinator {address}: {advice}") from error


def advice_on(sentence: str) -> str | None:
    """The reason in plain words and what to do, in place of gRPC's sentence; None where nothing better is known."""
    if any(mark in sentence for mark in _SPEAKS_HTTP):
        return (
            "an HTTP server answers there, and this needs the coordinator's gRPC port (50051 unless set), not the "
            "one of the page"
        )
    if _REFUSED in sentence:
        return "connection refused; is `tandem up` running there? If it listens elsewhere, name its address"
    return None

"""`benchmarks.one_process` as the services of the nursery are: forked, without kernels, with small steps prepared."""

import os
import socket

from benchmarks.one_process import load
from benchmarks.peers import serve
from tandem.engine.core import selection


def run(arguments: list[str]) -> None:
    """Serve over the socket of this path in place of stdin and stdout."""
    vars(selection)["load_native"] = lambda *_: None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(*arguments)
        for standard in (0, 1):
            os.dup2(connection.fileno(), standard)
    serve(load)

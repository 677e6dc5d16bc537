"""`python -m benchmarks.timing.delay --to HOST:PORT --ms ONE_WAY`: a connection that is longer than it is.

A process of its own with a thread for each direction: an event loop's timers are a millisecond wide, four times what a
network between two machines of a rack takes.
"""

from __future__ import annotations

import argparse
import queue
import socket
import sys
import threading
import time
from contextlib import suppress

from benchmarks.timing.sleeping import sleep_until

_CHUNK_BYTES = 1 << 16

_Chunks = queue.SimpleQueue[tuple[float, bytes]]


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--to", required=True)
    parser.add_argument("--ms", type=float, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log-level")
    options = parser.parse_args(arguments)
    host, _, port = options.to.rpartition(":")
    with socket.create_server(("127.0.0.1", options.port)) as server:
        sys.stdout.write(f"ready on 127.0.0.1:{server.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            near, _ = server.accept()
            far = socket.create_connection((host, int(port)))
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                chunks: _Chunks = queue.SimpleQueue()
                threading.Thread(target=_read, args=(source, chunks, options.ms / 1e3), daemon=True).start()
                threading.Thread(target=_write, args=(sink, chunks), daemon=True).start()


def _read(source: socket.socket, chunks: _Chunks, seconds: float) -> None:
    """Take what comes, with the moment at which it is due; an empty chunk is the end."""
    data = b"."
    while data:
        try:
            data = source.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        chunks.put((time.perf_counter() + seconds, data))


def _write(sink: socket.socket, chunks: _Chunks) -> None:
    while True:
        due, data = chunks.get()
        sleep_until(due)
        try:
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
        except OSError:
            return  # the other end is gone


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(sys.argv[1:])

"""Keeps gRPC's events coming while there are more of them than turns of the event loop.

For each event, a thread of `grpc.aio` writes a byte to a socket, which wakes the event loop; the loop then reads one
byte and handles all events that there are. Under load a turn of the loop handles many events, so bytes pile up. Once
there are 278, Linux lets the thread write again only after three quarters of them were read, and until then no event of
the whole process arrives: 0.6 to 1.0 s, beside 64 clients that send large prompts.
"""

from __future__ import annotations

import socket

import grpc.aio

_ALL_BYTES = 1 << 16
"""More than the socket holds."""


class _ReadEnd(socket.socket):
    """Reads all bytes that there are, however few are asked for."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """All bytes. Whoever reads them handles every event that came before."""
        return super().recv(max(bufsize, _ALL_BYTES), flags)


def read_all_wake_ups() -> None:
    """Let this process read all bytes at once. Called on the event loop, before anything else of `grpc.aio` is used;
    later it has no effect."""
    own_pair = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        read_end, write_end = own_pair()
        return _ReadEnd(read_end.family, read_end.type, read_end.proto, read_end.detach()), write_end

    # gRPC offers no other way to the sockets, which it makes here, and which live as long as anything uses `grpc.aio`.
    socket.socketpair = pair  # type: ignore[assignment]
    try:
        grpc.aio.init_grpc_aio()
    finally:
        socket.socketpair = own_pair

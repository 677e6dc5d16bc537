"""Addresses, and the names that stand for several of them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a host's name and a port to IP addresses.

Raises:
    OSError: the name has no address, or no name server answered.
"""


UNIX = "unix:"
"""Begins the address of a Unix socket: unix:PATH."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address as a user gave it."""

    host: str
    """A name, or an IP address without brackets; the whole text for a form that only gRPC knows, such as unix:/path."""
    port: int
    """-1 for such a form."""

    def __str__(self) -> str:
        return self.host if self.port < 0 else join_address(self.host, self.port)

    @property
    def is_name(self) -> bool:
        """True if the host has to be resolved, and may stand for several replicas."""
        if self.port < 0:
            return False
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return True
        return False


def join_address(host: str, port: int) -> str:
    """host:port, with brackets where an IPv6 address needs them. A Unix socket has no port."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """The parts of host:port."""
    if text.startswith((UNIX, "unix-abstract:", "vsock:")):
        return Address(text, -1)
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and host[0] != "["):
        raise ValueError(
            f"{text!r} is not an address; it must be host:port, or [host]:port for an IPv6 address"
        )
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def split_addresses(text: str) -> tuple[Address, ...]:
    """The addresses of a text with commas between them."""
    return tuple(parse_address(part.strip()) for part in text.split(",") if part.strip())


async def resolve(host: str, port: int) -> list[str]:
    """The IP addresses of a name, from the system's resolver.

    For a name with addresses of both families only the IPv4 ones count: otherwise a replica with one of each would
    count twice.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return list(dict.fromkeys(str(address[0]) for family, *_, address in found if family == wanted))


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server that listens on that address."""
    if host.lower() == "localhost" or host.startswith(UNIX):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(address: str) -> bool:
    """True if an address, host:port or unix:path, is on this machine."""
    return address.startswith(UNIX) or is_loopback(address.rpartition(":")[0].strip("[]"))

"""One server's life: bind, load, serve, drain, exit."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, runtime_checkable

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.errors import ConfigurationError, TandemError
from tandem.rpc.wake_ups import read_all_wake_ups
from tandem.serving.calls import RunningCalls
from tandem.serving.certificates import watch_expiry
from tandem.serving.interceptors.anonymous_calls import AnonymousCallLimiter
from tandem.serving.interceptors.auth import AuthInterceptor
from tandem.serving.interceptors.error_boundary import ErrorBoundary
from tandem.serving.interceptors.readiness import ReadinessInterceptor
from tandem.serving.protection import token_source
from tandem.serving.readiness import Readiness, serve_until
from tandem.serving.signals import stop_signals
from tandem.serving.tls import server_credentials
from tandem.settings import ServerSettings
from tandem.standard_streams import write_out

logger = logging.getLogger(__name__)

ENGINE_FAILED = "the engine has failed, and the log has the reason; start the service again"
"""A `CanFail.failure`."""

# How long the last words of calls that have ended may take to be sent, and watchers of health are borne with.
_GOODBYE_SECONDS = 0.5

_SERVER_OPTIONS = (
    # A peer that is gone without a word is noticed by pings; clients may ping as often.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One call is taken in each turn of the event loop; a rush may wait its turn, and is not cancelled without a word
    # after 30 s or from the thousandth call on. Deadlines and our own bounds end what waits too long.
    ("grpc.server_max_unrequested_time_in_server", 600),
    ("grpc.server.max_pending_requests", 4_096),
    ("grpc.server.max_pending_requests_hard_limit", 8_192),
)


class Service(Protocol):
    """A service that a server runs."""

    @property
    def name(self) -> str:
        """Its role: draft, target or coordinator."""

    @property
    def full_names(self) -> Sequence[str]:
        """Names of its gRPC services, for health and reflection."""

    request_drain: Callable[[], None]
    """Set by `serve` before anything else: ends the server as SIGTERM does."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add its servicers."""

    async def start(self) -> None:
        """Prepare to answer: load the model, or connect to other services."""

    async def close(self) -> None:
        """Release what `start` acquired. Called once no call runs."""


@runtime_checkable
class HasOtherEndpoints(Protocol):
    """A service with requests other than one gRPC call each: HTTP, or shared streams."""

    def open_other_endpoints(self, readiness: ReadinessInterceptor, calls: RunningCalls) -> None:
        """Open them. Their requests pass the readiness check and count as calls. Called first.

        Raises:
            ConfigurationError: an address cannot be bound.
        """


@runtime_checkable
class HasInterceptors(Protocol):
    """A service that decides about calls before they are read."""

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Run after all other interceptors, including the one for tokens."""


@runtime_checkable
class CanFail(Protocol):
    """A service that may become unable to continue, and then requests its own drain."""

    failure: str
    """Reason why it cannot; empty while it can."""


async def serve(
    settings: ServerSettings,
    service: Service,
    before_ready: Callable[[], None] = lambda: None,
    *,
    shares_port: bool = False,
    listens_late: bool = False,
) -> bool:
    """Serve until SIGTERM, SIGINT or SIGHUP, then let running calls finish within the drain timeout.

    Writes two lines to stdout: its address as soon as it listens, and another once it is ready. A second signal ends
    the process at once.

    Args:
        settings: Where and how to serve.
        service: What to serve.
        before_ready: Called once the service has started, before it accepts calls.
        shares_port: Whether other processes listen on the same port; the system gives each connection to one of them.
        listens_late: Whether to listen only once the service is ready, so that no connection comes here before.

    Returns:
        True if the server was ever ready.

    Raises:
        ConfigurationError: the address cannot be bound, or the service cannot start with its options.
        TandemError: the service could not continue.
    """
    read_all_wake_ups()
    calls = RunningCalls()
    readiness = Readiness(service.name, service.full_names)
    own = service.interceptors if isinstance(service, HasInterceptors) else ()
    server = new_server(settings, calls, readiness.interceptor, *own, shares_port=shares_port)
    await _register(server, service, readiness)
    if isinstance(service, HasOtherEndpoints):
        service.open_other_endpoints(readiness.interceptor, calls)
    address = "" if listens_late else _bind(server, settings, shares_port=shares_port)
    with stop_signals() as stopping:
        service.request_drain = stopping.set
        if not listens_late:
            await server.start()
        expiry = asyncio.create_task(watch_expiry(settings.certificate_files))
        try:
            if not listens_late:
                announce(f"tandem {service.name}: listening on {address}")
            was_ready = await _unless(stopping, service.start())
            if was_ready:
                before_ready()
                await readiness.open()
                if listens_late:
                    address = _bind(server, settings, shares_port=shares_port)
                    await server.start()
                announce(f"tandem {service.name}: ready on {address}")
                await serve_until(stopping, service, readiness)
            await readiness.close()
            await _drain(calls, settings.drain_timeout_seconds, service.name)
            if isinstance(service, CanFail) and service.failure:
                raise TandemError(service.failure)
            return was_ready
        finally:
            expiry.cancel()
            # Only now: a server that stops takes no connection, and could not even say that it is draining.
            await server.stop(_GOODBYE_SECONDS)
            await service.close()
            logger.info("stopped", extra={"service": service.name})


async def _drain(calls: RunningCalls, seconds: float, service_name: str) -> None:
    """Let running calls finish, and cut off those that take longer."""
    if await calls.end(seconds):
        return
    logger.warning("calls cut off", extra={"service": service_name, "calls": len(calls)})
    calls.cut_off(f"the {service_name} service has drained for as long as it may, and stops")
    await calls.end(_GOODBYE_SECONDS)


def new_server(
    settings: ServerSettings,
    calls: RunningCalls,
    *interceptors: grpc.aio.ServerInterceptor,
    shares_port: bool = False,
) -> grpc.aio.Server:
    """Create a server with the error boundary, authentication, the limit on anonymous calls, and these interceptors.

    Raises:
        ConfigurationError: a file of tokens cannot be read, or holds none.
    """
    boundary = ErrorBoundary(calls, settings.stalled_reader_timeout_seconds)
    authentication = AuthInterceptor(token_source(settings, settings.host))
    return grpc.aio.server(
        interceptors=[boundary, authentication, AnonymousCallLimiter(), *interceptors],
        # By default two servers that share a port by mistake would not notice.
        options=(("grpc.so_reuseport", int(shares_port)), *_SERVER_OPTIONS),
        maximum_concurrent_rpcs=settings.max_concurrent_streams,
    )


async def _register(server: grpc.aio.Server, service: Service, readiness: Readiness) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(readiness.health, server)
    service.register(server)
    reflection.enable_server_reflection(
        [*service.full_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    await readiness.announce(health_pb2.HealthCheckResponse.NOT_SERVING)


def _bind(server: grpc.aio.Server, settings: ServerSettings, *, shares_port: bool) -> str:
    host, port = settings.host, settings.port
    credentials = None
    if settings.tls_cert_file is not None and settings.tls_key_file is not None:
        credentials = server_credentials(
            settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
        )
    if not shares_port:
        check_free(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"{name}:{port}"
    if credentials is None:
        return f"{name}:{server.add_insecure_port(address)}"
    return f"{name}:{server.add_secure_port(address, credentials)}"


def check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be bound, before gRPC does: it writes lines of its own to stderr.

    Raises:
        ConfigurationError: saying which address, and why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}; "
            "choose another address with --host and --port"
        ) from error


async def _unless(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do the work unless the event comes first. True when the work was done; its exception is raised."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


def announce(line: str) -> None:
    """Write a line to stdout at once.

    Raises:
        OutputError: stdout cannot be written.
    """
    write_out(line + "\n")

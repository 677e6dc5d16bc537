"""A gRPC server's life: bind, load, serve, drain; and its process, from the command line to the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.config.settings import ServerSettings, load_settings
from tandem.errors import ConfigurationError, ModelFolderError, ServiceUnavailableError, TandemError
from tandem.rpc.addresses import UNIX, join_address
from tandem.rpc.channels import read_all_wake_ups
from tandem.serving.interceptors import (
    AnonymousCallLimiter,
    CallInterceptor,
    RunningCalls,
    Step,
    authorizing,
    guarding,
)
from tandem.serving.protection import server_credentials, token_source, watch_expiry
from tandem.serving.standard_streams import exit_with, fill_closed, write_out
from tandem.telemetry.logs import configure

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@contextmanager
def stop_signals(before_end: Callable[[], None] = lambda: None) -> Iterator[asyncio.Event]:
    """An event that SIGTERM, SIGINT and SIGHUP set. A further SIGTERM or SIGINT ends the process at once.

    A terminal that closes sends SIGHUP, and its shell may send it again, so a further one is no sign of impatience.
    SIGHUP stays ignored where it was ignored at the start, as nohup asks for. `before_end` is called before the process
    ends at once.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if stopping.is_set() and number != signal.SIGHUP:
            logger.warning("second signal; nothing more is waited for", extra={"signal": number})
            before_end()
            end_now(128 + number)  # as shells report a death by a signal
        stopping.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def end_now(code: int) -> NoReturn:
    """End the process without the interpreter's own end, which waits for threads and may abort because of them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


class CancelledByEventError(Exception):
    """Work was not done because an event came before its end."""


class Readiness:
    """Readiness of a server: it admits or refuses calls, and reports the health status."""

    def __init__(self, name: str, full_names: Sequence[str], calls: RunningCalls) -> None:
        self._calls = calls
        self.health = health.aio.HealthServicer()
        self.name = name
        self._full_names = full_names
        self._held_because = ""
        """Reason why it takes no calls though nothing is wrong; empty while it may."""
        self._is_closed = False

    async def announce(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in ("", *self._full_names):
            await self.health.set(name, status)

    async def open(self) -> None:
        if self._is_closed:
            return
        if self._held_because:
            await self.pause(self._held_because)
            return
        self._calls.reopen()
        await self.announce(health_pb2.HealthCheckResponse.SERVING)

    async def pause(self, reason: str) -> None:
        """Refuse calls with this reason until `open` is called."""
        if self._is_closed:
            return
        self._calls.closed_because = reason
        await self.announce(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def hold(self, reason: str) -> None:
        """Refuse calls with this reason until `release` is called, whatever else opens it."""
        self._held_because = reason
        await self.pause(reason)

    async def release(self) -> None:
        self._held_because = ""
        await self.open()

    async def end_calls(self, error: TandemError | None) -> int:
        """Wait for the end of all calls while no new one is taken; an error ends them at once. Returns how many it
        ended."""
        ended = 0 if error is None else self._calls.cut_off(error)
        while not await self._calls.end(_END_POLL_SECONDS):
            pass
        return ended

    async def close(self) -> None:
        self._is_closed = True
        self._calls.closed_because = f"the {self.name} service is draining"
        # Each watcher holds a lock while its answer is written; one that does not read must not hold up the drain.
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.health.enter_graceful_shutdown()
        logger.info("draining", extra={"service": self.name})


_END_POLL_SECONDS = 60.0

# How long the last words of calls that have ended may take to be sent, and watchers of health are borne with.
GOODBYE_SECONDS = 0.5

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


class Service(ABC):
    """A service that a server runs."""

    name: str
    """draft, target or coordinator."""
    full_names: Sequence[str]
    """Names of its gRPC services, for health and reflection."""
    steps: Sequence[Step] = ()
    """Decide about calls before they are read, after all others, including the one for tokens."""
    request_drain: Callable[[], None]
    """Set by `serve` before anything else: ends the server as SIGTERM does."""
    readiness: Readiness
    """Set by `serve` before anything is registered."""
    failure = ""
    """Reason why it cannot go on; empty while it can."""

    @property
    def overdue_seconds(self) -> float:
        """Seconds that the service has been stuck in a step; 0 while all is well."""
        return 0.0

    def open_other_endpoints(self, calls: RunningCalls) -> None:  # noqa: B027 - most have none
        """Open what serves requests other than one gRPC call each: HTTP, or shared streams. Called first."""

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Add its servicers."""

    @abstractmethod
    async def start(self) -> None:
        """Prepare to answer: load the model, or connect to other services."""

    @abstractmethod
    async def close(self) -> None:
        """Release what `start` acquired. Called once no call runs."""


async def serve(
    settings: ServerSettings,
    service: Service,
    before_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then let running calls finish within the drain timeout.

    Writes two lines to stdout: its address as soon as it listens, and another once it is ready. A second signal ends
    the process at once.

    Args:
        before_ready: Called once the service has started, before it accepts calls.
    """
    read_all_wake_ups()
    calls = RunningCalls(f"the {service.name} service is still starting", settings.max_concurrent_streams)
    readiness = Readiness(service.name, service.full_names, calls)
    service.readiness = readiness
    server = new_server(settings, calls, *service.steps)
    await _register(server, service, readiness)
    service.open_other_endpoints(calls)
    address = _bind(server, settings)
    with stop_signals() as stopping:
        service.request_drain = stopping.set
        await server.start()
        expiry = asyncio.create_task(watch_expiry(settings.certificate_files))
        try:
            announce(f"tandem {service.name}: listening on {address}")
            with suppress(CancelledByEventError):
                await unless(stopping.wait(), service.start())
                before_ready()
                await readiness.open()
                announce(f"tandem {service.name}: ready on {address}")
                await _serve_until(stopping, service, readiness)
            await readiness.close()
            await _drain(calls, settings.drain_timeout_seconds, service.name)
            if service.failure:
                raise TandemError(service.failure)
        finally:
            expiry.cancel()
            # Only now: a server that stops takes no connection, and could not even say that it is draining.
            await server.stop(GOODBYE_SECONDS)
            await service.close()
            logger.info("stopped", extra={"service": service.name})


async def _serve_until(stopping: asyncio.Event, service: Service, readiness: Readiness) -> None:
    """Wait for the end, and take no new calls while the service is stuck."""
    is_paused = False
    while not stopping.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stopping.wait()
        seconds = service.overdue_seconds
        name = readiness.name
        if seconds and not is_paused:
            logger.error("a step does not end", extra={"service": name, "seconds": round(seconds, 1)})
            await readiness.pause(f"the {name} service has been stuck in a step for {seconds:.0f} s")
        elif is_paused and not seconds:
            logger.warning("the step has ended", extra={"service": name})
            await readiness.open()
        is_paused = bool(seconds)


async def _drain(calls: RunningCalls, seconds: float, service_name: str) -> None:
    if await calls.end(seconds):
        return
    logger.warning("calls cut off", extra={"service": service_name, "calls": len(calls)})
    calls.cut_off(
        ServiceUnavailableError(f"the {service_name} service has drained for as long as it may, and stops")
    )
    await calls.end(GOODBYE_SECONDS)


def new_server(settings: ServerSettings, calls: RunningCalls, *steps: Step) -> grpc.aio.Server:
    """Create a server: error boundary, authentication, limit on anonymous calls, readiness, and these steps."""
    guarded = guarding(calls, settings.stalled_reader_timeout_seconds)
    authorized = authorizing(token_source(settings, settings.host))
    return grpc.aio.server(
        interceptors=[
            CallInterceptor(*steps, calls.refuse_closed, AnonymousCallLimiter().limit, authorized, guarded)
        ],
        # By default two servers that share a port by mistake would not notice.
        options=(("grpc.so_reuseport", 0), *_SERVER_OPTIONS),
        maximum_concurrent_rpcs=settings.max_concurrent_streams,
    )


async def _register(server: grpc.aio.Server, service: Service, readiness: Readiness) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(readiness.health, server)
    service.register(server)
    reflection.enable_server_reflection(
        [*service.full_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    await readiness.announce(health_pb2.HealthCheckResponse.NOT_SERVING)


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    host = settings.host
    address = join_address(settings.host, settings.port)
    _check_free(host, settings.port)
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return join_address(host, server.add_insecure_port(address))
    files = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    return join_address(host, server.add_secure_port(address, server_credentials(*files)))


def _check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be bound, before gRPC does: it writes lines of its own to stderr."""
    if host.startswith(UNIX):
        _check_unix_socket(Path(host.removeprefix(UNIX)))
    else:
        bound_socket(host, port, "--host and --port").close()


MAX_SOCKET_PATH_BYTES = 107
"""Of a Unix socket, by Linux's `sockaddr_un`."""


def _check_unix_socket(path: Path) -> None:
    """Refuse a socket that cannot be made. One that a server has left behind is removed; gRPC would also take the place
    of one that is in use."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"cannot listen on {UNIX}{path}: its path has {size} bytes; it must have at most {MAX_SOCKET_PATH_BYTES}"
        )
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
        path.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"cannot listen on {UNIX}{path}: {reason}; choose another socket with --host"
        ) from error


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def bound_socket(host: str, port: int, options: str) -> socket.socket:
    """A socket with this address, which does not listen yet. Its error names the options to choose another."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}; "
            f"choose another address with {options}"
        ) from error
    return bound


async def unless(event: Coroutine[Any, Any, object], work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Do the work, unless the event comes first, which cancels it."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(event)
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledByEventError
        return task.result()
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


def announce(line: str) -> None:
    """Write a line to stdout at once."""
    write_out(line + "\n")


YOUNG_OBJECTS = 10_000
"""New objects, less those that were freed, after which the collector looks at them. With Python's default of 700 a
coordinator collects hundreds of times a second and finds nothing, since rounds leave no cycles: a tenth of its time."""


STARTING_OBJECTS = 200_000
"""The same while a process starts: nearly all that it imports stays, and visiting it again and again took a fifth of
the import of torch and transformers."""


def set_start_aside() -> None:
    """Exempt all present objects from later collections.

    A service that has imported torch and loaded its model holds some 400,000 objects for its whole life. A full
    collection visits all of them while every request waits: 0.2 to 0.3 s in a target or draft service, 0.03 to 0.05 s
    in a coordinator. Present garbage is collected first, since it would stay forever. Later
    collections come more rarely (`YOUNG_OBJECTS`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def in_daemon_thread(load: Callable[[], ResultT]) -> ResultT:
    """Await `load` in a daemon thread and return its result.

    Unlike a thread of the loop's own pool this one holds up neither the loop's end nor the process's.
    """
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it from now on

    def work() -> None:
        try:
            future.set_result(load())
        except Exception as error:  # noqa: BLE001 - the waiting caller gets any error
            future.set_exception(error)

    threading.Thread(target=work, name="tandem-load", daemon=True).start()
    return await asyncio.wrap_future(future)


SettingsT = TypeVar("SettingsT", bound=ServerSettings)


def main(
    settings_class: type[SettingsT],
    make_service: Callable[[SettingsT], Service],
    program: str,
    arguments: Sequence[str],
) -> None:
    """Serve until a signal ends it.

    Exits 0 after a drain, 2 when the process cannot run as its options are, 1 on any other failure that has a name: a
    model folder that cannot be served, a model that computes no numbers, an engine that failed.
    """
    with exit_codes():
        settings = settings_of_process(settings_class, arguments, program)
        uvloop.run(serve_to_the_end(settings, make_service(settings)))


def settings_of_process(settings_class: type[SettingsT], arguments: Sequence[str], program: str) -> SettingsT:
    """The settings of this process, with whose log it begins."""
    gc.set_threshold(STARTING_OBJECTS)
    fill_closed()
    settings = load_settings(settings_class, arguments, program)
    configure(settings.log_level, settings.log_format)
    return settings


async def serve_to_the_end(settings: ServerSettings, service: Service) -> None:
    """Serve, and end the process at once: everything is closed by then. See `serve`.

    The event loop's and the interpreter's own ends wait for tasks and threads: a model may still be being read on
    another thread, in code that does not survive them.
    """
    await serve(settings, service, set_start_aside)
    end_now(0)


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the process with a sentence and an exit code when the block raises an error that has a name. See `main`."""
    try:
        yield
    except TandemError as error:
        is_setup = isinstance(error, ConfigurationError) and not isinstance(error, ModelFolderError)
        exit_with(error, 2 if is_setup else 1)

"""Parent of several coordinator processes on one port: starts them, restarts them, and drains them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import grpc.aio
import prometheus_client

from coordinator.admin.servicer import AdminServicer
from coordinator.http.server import bound_socket
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.workers.hub import Given, Hub
from coordinator.workers.link import WorkerSetup, forwarded_caller, metrics_handler, parent_address
from tandem.errors import ConfigurationError
from tandem.serving.interceptors import ErrorBoundary, RunningCalls
from tandem.serving.server import announce, check_free, stop_signals
from tandem.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer


logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0


async def admin_server(hub: Hub, folder: str) -> grpc.aio.Server:
    """Serve AdminService and metrics to the workers, which forward their callers' calls."""
    server = grpc.aio.server(interceptors=[ErrorBoundary(RunningCalls())])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(hub, forwarded_caller), server)
    server.add_generic_rpc_handlers((metrics_handler(hub.metrics_text),))
    server.add_insecure_port(parent_address(folder))
    await server.start()
    return server


def serve_metrics(settings: CoordinatorSettings, hub: Hub) -> WSGIServer | None:
    """Serve the metrics of all workers at the Prometheus port; None where there is none.

    Raises:
        ConfigurationError: the port cannot be bound.
    """
    host, port = settings.prometheus_host, settings.prometheus_port
    if port is None:
        return None
    loop = asyncio.get_running_loop()

    def read() -> list[prometheus_client.Metric]:
        # Called on a thread of the server.
        return asyncio.run_coroutine_threadsafe(hub.metrics(), loop).result(_PATIENCE_SECONDS)

    registry = prometheus_client.CollectorRegistry()
    registry.register(Given(read))
    try:
        server, _ = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {host}:{port}: {(error.strerror or str(error)).lower()}; choose another "
            "address with --prometheus-host and --prometheus-port"
        ) from error
    logger.info("metrics served", extra={"address": f"{host}:{server.server_port}"})
    return server


_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.25, 30.0
_STABLE_SECONDS = 30.0
"""A worker that ran for so long is started again without a long wait."""
_KILL_SECONDS = 10.0
"""Time beyond the drain before a worker that does not end is killed."""


@dataclass(frozen=True, slots=True)
class Ports:
    """What the workers share, held by the parent for as long as it lives."""

    grpc: int
    http: socket.socket | None


class Supervisor:
    """Runs a coordinator of several processes."""

    def __init__(self, settings: CoordinatorSettings, arguments: Sequence[str]) -> None:
        """Nothing is started yet.

        Args:
            settings: Of the whole coordinator.
            arguments: The command line that they were read from; workers read it again.
        """
        self._settings = settings
        self._arguments = arguments
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        """The latest process of each worker."""
        self._keepers: list[asyncio.Task[None]] = []
        self._ready = [asyncio.Event() for _ in range(settings.workers)]
        """Set once a worker's first process takes requests."""
        self._address = ""
        """Where requests are taken, as the first worker told."""
        self._is_ending = False

    async def run(self) -> int:
        """Run until a signal, then drain all workers.

        Returns:
            The exit code: 0, or that of a worker that could not start.

        Raises:
            ConfigurationError: an address cannot be bound.
        """
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with TemporaryDirectory(prefix="tandem-") as self._folder, held_ports(self._settings) as self._ports:
            self._hub = Hub(self._settings, self._folder)
            private = await admin_server(self._hub, self._folder)
            shown = serve_metrics(self._settings, self._hub)
            try:
                with stop_signals(before_end=self._kill) as stopping:
                    return await self._supervise(stopping)
            finally:
                if shown is not None:
                    await asyncio.to_thread(shown.shutdown)
                    shown.server_close()
                await private.stop(0)
                await self._hub.close()

    async def _supervise(self, stopping: asyncio.Event) -> int:
        stop = asyncio.ensure_future(stopping.wait())
        counting = asyncio.create_task(self._hub.keep_counts())
        started = asyncio.create_task(self._start())
        try:
            ends: set[asyncio.Future[Any]] = {stop, self._failed}
            await asyncio.wait({*ends, started}, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                started.result()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return self._failed.result() if self._failed.done() else 0
        finally:
            for task in (stop, counting, started):
                task.cancel()
            await self._end_all()

    async def _start(self) -> None:
        """Start the first worker, and the others once it takes requests: what is wrong is said once."""
        for index, is_ready in enumerate(self._ready):
            self._keepers.append(asyncio.create_task(self._keep(index)))
            if index == 0:
                await is_ready.wait()
        for is_ready in self._ready:
            await is_ready.wait()
        announce(f"tandem coordinator: ready on {self._address}")

    async def _keep(self, index: int) -> None:
        """Run one process of a worker after the other."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            code = await self._run_worker(index)
            if self._is_ending:
                return
            if not self._address:  # none has ever taken requests
                if not self._failed.done():
                    self._failed.set_result(code if code > 0 else 1)
                return
            if time.monotonic() - began > _STABLE_SECONDS:
                backoff = _FIRST_BACKOFF_SECONDS
            logger.warning(
                "worker ended; it is started again",
                extra={"worker": index, "exit_code": code, "seconds": backoff},
            )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    async def _run_worker(self, index: int) -> int:
        """Run a process of a worker to its end; its exit code."""
        http = None if self._ports.http is None else self._ports.http.fileno()
        setup = WorkerSetup(
            index,
            self._ports.grpc,
            self._folder,
            http,
            listens_late=bool(self._address),
            changes=dict(self._hub.changes),
            drained=sorted(self._hub.drained),
        )
        process = self._processes[index] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # otherwise Python would import files from the working directory
            *("-m", "tandem.serving.supervised", str(os.getpid()), "coordinator.workers.worker"),
            setup.to_json(),
            *self._arguments,
            # Never written to: when this process ends, the pipe closes, which the worker notices.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C reaches only this process, which then ends the workers.
            start_new_session=True,
            pass_fds=() if http is None else (http,),
        )
        if self._is_ending:  # the signal came while the process was made
            process.terminate()
        try:
            await self._read(index, process)
            return await process.wait()
        finally:
            await self._hub.left(index)

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> None:
        """Follow a worker's stdout to its end."""
        assert process.stdout is not None
        async for line in process.stdout:
            what, found, rest = line.decode().strip().removeprefix("tandem coordinator: ").partition(" on ")
            if found and what == "ready":
                self._hub.joined(index)
                self._address = self._address or rest
                self._ready[index].set()
            elif found and not self._address:
                # Whoever started this process knows these lines from a coordinator of one process.
                announce(f"tandem coordinator: {what} on {rest}")

    async def _end_all(self) -> None:
        """Drain all workers at the same time."""
        self._is_ending = True
        running = list(self._processes.values())
        for process in running:
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(self._settings.drain_timeout_seconds + _KILL_SECONDS):
                await asyncio.gather(*(process.wait() for process in running))
        except TimeoutError:
            self._kill()
        for keeper in self._keepers:
            # One that waits to start its worker again.
            if all(process.returncode is not None for process in running):
                keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def _kill(self) -> None:
        """End the workers at once."""
        for process in self._processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()


@contextmanager
def held_ports(settings: CoordinatorSettings) -> Iterator[Ports]:
    """Take the ports before any worker does, so that all have the same, and keep them from others.

    Raises:
        ConfigurationError: an address cannot be bound, or ports cannot be shared here.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigurationError("workers share a port by SO_REUSEPORT, which this system does not have")
    check_free(settings.host, settings.port)
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM
    )[0]
    # Bound and not listening: it gets no connection.
    with socket.socket(family, kind, protocol) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
        http = None if settings.http_port is None else bound_socket(settings.http_host, settings.http_port)
        try:
            yield Ports(held.getsockname()[1], http)
        finally:
            if http is not None:
                http.close()

"""Parent of several coordinator processes on one port: starts them, restarts them, and drains them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry, Metric

from coordinator.admin.servicer import AdminServicer
from coordinator.http.server import listening_socket
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.workers.hub import Hub
from coordinator.workers.link import WorkerSetup, forwarded_caller, private_server, socket_address
from tandem.errors import ConfigurationError
from tandem.serving.children import Child
from tandem.serving.server import announce, bound_socket, check_free, stop_signals
from tandem.telemetry.metrics import end_server, serve_metrics
from tandem.telemetry.names import registry_of

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.25, 30.0
"""Waits before a worker that ended is started again, each twice the one before."""


class Supervisor:
    """Runs a coordinator of several processes."""

    def __init__(self, settings: CoordinatorSettings, arguments: Sequence[str]) -> None:
        """Nothing is started yet. Workers read the settings again from the same arguments."""
        self._settings = settings
        self._arguments = arguments
        self._hub = Hub(settings)
        self._workers: dict[int, Child] = {}
        """The latest process of each worker."""
        self._ready: set[int] = set()
        """Workers of which a process took requests."""
        self._address = ""
        """Where requests are taken, as the first worker told."""

    async def run(self) -> int:
        """Run until a signal, then drain all workers.

        Returns:
            The exit code: 0, or that of a worker that could not start.

        Raises:
            ConfigurationError: an address cannot be bound.
        """
        settings, hub = self._settings, self._hub
        with TemporaryDirectory(prefix="tandem-") as self._folder, held_ports(settings) as (port, http):
            self._port, self._http = port, http
            admin = AdminServicer(hub, forwarded_caller)
            private = await private_server(socket_address(self._folder), admin, hub.metrics_text)
            shown = serve_metrics(settings, self._registry())
            try:
                with stop_signals(before_end=self._kill) as stopping:
                    return await self._supervise(stopping)
            finally:
                await end_server(shown)
                await private.stop(0)
                await hub.close()

    def _registry(self) -> CollectorRegistry:
        loop = asyncio.get_running_loop()

        def read() -> list[Metric]:
            # Called on a thread of the metrics server.
            # Prometheus's own patience
            return asyncio.run_coroutine_threadsafe(self._hub.metrics(), loop).result(10.0)

        return registry_of(read)

    async def _supervise(self, stopping: asyncio.Event) -> int:
        self._has_begun = asyncio.Event()
        """Set once any worker takes requests."""
        stop = asyncio.ensure_future(stopping.wait())
        counting = asyncio.ensure_future(self._hub.keep_counts())
        keepers = [asyncio.create_task(self._keep(index)) for index in range(self._settings.workers)]
        try:
            await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            return next((keeper.result() for keeper in keepers if keeper.done()), 0)
        finally:
            tasks = (stop, counting, *keepers)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, index: int) -> int:
        """Run one process of a worker after the other; the exit code of one that ended before any took requests."""
        if index:
            await self._has_begun.wait()  # what is wrong is said once
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            began = time.monotonic()
            code = await self._run_worker(index)
            if not self._address:
                return code if code > 0 else 1
            # One that was stable is started again without a long wait
            if time.monotonic() - began > 30.0:
                backoff = _FIRST_BACKOFF_SECONDS
            logger.warning(
                "worker ended; it is started again",
                extra={"worker": index, "exit_code": code, "seconds": backoff},
            )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    async def _run_worker(self, index: int) -> int:
        """Run a process of a worker to its end, or drain it when the task is cancelled; its exit code."""
        http = None if self._http is None else self._http.fileno()
        setup = WorkerSetup(
            index,
            self._port,
            self._folder,
            http,
            listens_late=bool(self._address),
            changes=self._hub.live_config.changes,
            drained=sorted(self._hub.drained),
        )
        # Ten seconds after its drain should have ended it is killed
        worker = self._workers[index] = await Child.start(
            f"worker {index}",
            f"{__package__}.worker",
            [json.dumps(asdict(setup)), *self._arguments],
            self._settings.drain_timeout_seconds + 10.0,
            pass_fds=() if http is None else (http,),
        )
        try:
            await self._follow(setup, worker)
            return await worker.process.wait()
        finally:
            await worker.stop()
            await self._hub.left(index)

    async def _follow(self, setup: WorkerSetup, worker: Child) -> None:
        async for line in worker.lines():
            what, found, rest = line.removeprefix("tandem coordinator: ").partition(" on ")
            if found and what == "ready":
                self._hub.joined(setup.index, setup.address)
                self._address = self._address or rest
                self._has_begun.set()
                is_new = setup.index not in self._ready
                self._ready.add(setup.index)
                if is_new and len(self._ready) == self._settings.workers:
                    announce(f"tandem coordinator: ready on {self._address}")
            elif found and not self._address:
                # Whoever started this process knows these lines from a coordinator of one process.
                announce(f"tandem coordinator: {what} on {rest}")

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()


@contextmanager
def held_ports(settings: CoordinatorSettings) -> Iterator[tuple[int, socket.socket | None]]:
    """The port for gRPC and the socket for HTTP, taken before any worker takes them, and kept from others.

    Raises:
        ConfigurationError: an address cannot be bound, or ports cannot be shared here.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigurationError("workers share a port by SO_REUSEPORT, which this system does not have")
    check_free(settings.host, settings.port)
    # Bound and not listening: it gets no connection.
    with bound_socket(settings.host, settings.port, "--host and --port", socket.SO_REUSEPORT) as held:
        http = (
            None if settings.http_port is None else listening_socket(settings.http_host, settings.http_port)
        )
        try:
            yield held.getsockname()[1], http
        finally:
            if http is not None:
                http.close()

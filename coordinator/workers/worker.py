"""`python -m coordinator.workers.worker SETUP ...`: one of several coordinator processes on a port."""

from __future__ import annotations

import json
import socket
import sys

import grpc.aio
import uvloop

from coordinator.admin.servicer import AdminServicer
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.telemetry.setup import CoordinatorTelemetry
from coordinator.workers.link import (
    ForwardedAdmin,
    Peer,
    WorkerSetup,
    private_server,
    settings_of_worker,
    socket_address,
)
from tandem.admin import Status
from tandem.logs import configure
from tandem.serving.server import end_now, exit_codes, serve, set_start_aside
from tandem.settings import load_settings
from tandem.standard_streams import fill_closed

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class WorkerService(CoordinatorService):
    """A coordinator that lets its parent answer what concerns all workers."""

    def __init__(self, settings: CoordinatorSettings, setup: WorkerSetup) -> None:
        """Set everything up, with the settings of the whole coordinator; nothing is connected yet."""
        has_readers = settings.http_port is not None or settings.prometheus_port is not None
        own = settings_of_worker(settings, setup)
        listening = None if setup.http_socket is None else socket.socket(fileno=setup.http_socket)
        super().__init__(own, CoordinatorTelemetry.of(own, is_read=has_readers), listening)
        self.answers_while_starting = not setup.listens_late
        self._setup = setup
        if setup.changes:
            self.live_config.change(setup.changes, (), "the state before this worker's start")
        self._private: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Open the way to this process alone, and start as any coordinator. See `CoordinatorService`."""
        admin = AdminServicer(self.administration)
        self._private = await private_server(self._setup.address, admin, self._own_metrics)
        await super().start()
        for shot in self.replicas.snapshots():
            if shot.address in self._setup.drained:
                self.replicas.drain(shot.role, shot.address)

    def register_admin(self, server: grpc.aio.Server) -> None:
        """Let the parent answer AdminService."""
        # Made here and not earlier: a channel belongs to the event loop.
        self._parent = Peer(socket_address(self._setup.folder))
        server.add_generic_rpc_handlers((ForwardedAdmin(self._parent),))

    async def status(self) -> Status:
        """The status of all workers."""
        return await self._parent.status()

    async def metrics(self) -> tuple[bytes, str] | None:
        """The metrics of all workers."""
        return await self._parent.metrics_text(), _CONTENT_TYPE

    async def close(self) -> None:
        await super().close()
        if self._private is not None:
            # A call of the parent may be under way
            await self._private.stop(0.2)
        await self._parent.close()

    async def _own_metrics(self) -> bytes:
        found = self.telemetry.prometheus_text()
        return b"" if found is None else found[0]


def run(arguments: list[str]) -> None:
    """Serve as the worker that the first argument describes, until a signal ends it."""
    setup = WorkerSetup(**json.loads(arguments[0]))
    with exit_codes():
        fill_closed()
        settings = load_settings(CoordinatorSettings, arguments[1:], "tandem serve coordinator")
        configure(settings.log_level, settings.log_format)
        was_ready = uvloop.run(
            serve(
                settings_of_worker(settings, setup),
                WorkerService(settings, setup),
                before_ready=set_start_aside,
                shares_port=True,
                listens_late=setup.listens_late,
            )
        )
    if not was_ready:
        end_now(0)


if __name__ == "__main__":
    run(sys.argv[1:])

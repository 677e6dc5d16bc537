"""Parent of several coordinator processes on one port: starts, restarts and drains them, and answers for all.

Requests never pass it: the system gives each connection to a worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple, replace
from itertools import chain, starmap
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TypeVar

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily

from coordinator.admin.administration import Administrator
from coordinator.admin.servicer import AdminServicer, caller
from coordinator.http.server import listening_socket
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.settings.live import LiveConfig
from coordinator.stats.speculation import summed
from coordinator.workers.worker import CALLER_KEY, Peer, WorkerSetup, private_server, socket_address
from tandem import admin
from tandem.errors import ServiceUnavailableError, TandemError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role, replica_at
from tandem.serving.children import Child
from tandem.serving.interceptors import metadata_of
from tandem.serving.server import announce, bound_socket, check_free, stop_signals
from tandem.telemetry.metrics import end_server, named, registry_of, serve_metrics

logger = logging.getLogger(__name__)

_JOINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "tandem_spec_decode_acceptance_rate": fmean,
    "tandem_spec_decode_avg_acceptance_length": fmean,
    "tandem_spec_decode_acceptance_rate_per_position": fmean,
    "tandem_spec_decode_conditional_acceptance_rate_per_position": fmean,
    "tandem_spec_decode_predicted_gain": fmean,
    "tandem_replica_round_trip_seconds": fmean,
    "tandem_replica_step_seconds": fmean,
    "tandem_spec_decode_proposal_length": max,
    # Every worker sees every replica, and counts it.
    "tandem_replicas": max,
    "tandem_replica_ready": min,
    "tandem_build_info": max,
    "process_start_time_seconds": min,
}
"""Gauges that are not added. Counters, histograms and all other gauges are."""

AnswerT = TypeVar("AnswerT")
NumbersT = TypeVar("NumbersT", admin.Load, admin.Outcomes, admin.Throughput)


class Supervisor:
    """Runs a coordinator of several processes."""

    def __init__(self, settings: CoordinatorSettings, arguments: Sequence[str]) -> None:
        """Nothing is started yet. Workers read the settings again from the same arguments."""
        self._settings = settings
        self._arguments = arguments
        self._hub = Hub(settings)
        self._processes: dict[int, Child] = {}
        """The latest of each worker."""
        self._starting = set(range(settings.workers))
        """Workers of which no process has taken requests yet."""
        self._has_begun = asyncio.Event()
        """Set once any worker takes requests."""

    async def run(self) -> int:
        """Run until a signal, then drain all workers; the exit code is 0, or that of a worker that could not start."""
        settings, hub, loop = self._settings, self._hub, asyncio.get_running_loop()
        host, http_port = settings.http_host, settings.http_port
        check_free(settings.host, settings.port)
        with (
            TemporaryDirectory(prefix="tandem-") as folder,
            # Taken before any worker takes it, and kept from others: bound and not listening, it gets no connection
            bound_socket(settings.host, settings.port, "--host and --port", socket.SO_REUSEPORT) as held,
            nullcontext() if http_port is None else listening_socket(host, http_port) as http,
        ):
            inherited = None if http is None else http.fileno()
            self._setup = WorkerSetup(0, held.getsockname()[1], folder, inherited)
            # The caller of a forwarded call is as the worker named it
            servicer = AdminServicer(
                hub, lambda call: metadata_of(call.invocation_metadata(), CALLER_KEY) or caller(call)
            )
            private = await private_server(socket_address(folder), servicer, hub.metrics_text)
            # Read on a thread of the metrics server, with Prometheus's own patience
            registry = registry_of(lambda: asyncio.run_coroutine_threadsafe(hub.metrics(), loop).result(10.0))
            shown = serve_metrics(settings, registry)
            try:
                with stop_signals(before_end=self._kill) as stopping:
                    return await self._supervise(stopping)
            finally:
                await end_server(shown)
                await private.stop(0)

    async def _supervise(self, stopping: asyncio.Event) -> int:
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
        backoff = 0.125
        while True:
            began = time.monotonic()
            code = await self._run_worker(index)
            if not self._has_begun.is_set():
                return code if code > 0 else 1
            # One that was stable is started again without a long wait
            backoff = 0.25 if time.monotonic() - began > 30.0 else min(2 * backoff, 30.0)
            extra = {"worker": index, "exit_code": code, "seconds": backoff}
            logger.warning("worker ended; it is started again", extra=extra)
            await asyncio.sleep(backoff)

    async def _run_worker(self, index: int) -> int:
        """Run a process of a worker to its end, or drain it when the task is cancelled; its exit code."""
        setup = replace(
            self._setup,
            index=index,
            listens_late=self._has_begun.is_set(),
            changes=self._hub.live_config.changes,
            drained=sorted(self._hub.drained),
        )
        process = self._processes[index] = await Child.start(
            f"worker {index}",
            f"{__package__}.worker",
            [json.dumps(asdict(setup)), *self._arguments],
            # Ten seconds after its drain should have ended it is killed
            self._settings.drain_timeout_seconds + 10.0,
            pass_fds=() if setup.http_socket is None else (setup.http_socket,),
        )
        try:
            async for line in process.lines():
                await self._heard(setup, line)
            return await process.process.wait()
        finally:
            await process.stop()
            await self._hub.left(index)

    async def _heard(self, setup: WorkerSetup, line: str) -> None:
        """Tell what a worker says as a coordinator of one process would, each line once."""
        what, found, rest = line.removeprefix("tandem coordinator: ").partition(" on ")
        if found and what == "ready":
            await self._hub.joined(setup)
            self._has_begun.set()
            if self._starting == {setup.index}:
                announce(f"tandem coordinator: ready on {rest}")
            self._starting.discard(setup.index)
        elif found and not self._has_begun.is_set():
            announce(f"tandem coordinator: {what} on {rest}")

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()


class Hub(Administrator):
    """Shows and steers all workers of a coordinator."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        super().__init__(LiveConfig(settings))
        self._workers: dict[int, Peer] = {}
        self._past: list[admin.Stats] = []
        self._past_metrics: list[Metric] = []
        """Counts of workers that have ended."""
        self.drained: set[str] = set()
        """Replicas that an operator drained, for workers that start later."""
        self._changing = asyncio.Lock()
        """Changes and joining workers take turns, so that no worker misses a change."""

    async def joined(self, setup: WorkerSetup) -> None:
        """A worker takes requests from now on. It is told what changed while it started."""
        # Half of the time that `tandem admin` waits for all of them
        worker = Peer(socket_address(setup.folder, setup.index), timeout_seconds=5.0)
        async with self._changing:
            self._workers[setup.index] = worker
            changes, drained = self.live_config.changes, set(setup.drained)
            calls: list[Awaitable[object]] = []
            if changes != setup.changes:
                calls.append(worker.update_config(changes, setup.changes.keys() - changes.keys()))
            calls += [worker.drain(each, allow_last_target=True) for each in self.drained - drained]
            calls += [worker.resume(each) for each in drained - self.drained]
            # It may have died already, or not know a replica whose name has moved on
            await asyncio.gather(*calls, return_exceptions=True)

    async def left(self, index: int) -> None:
        """A worker has ended, if it had joined. What it counted stays in the sums."""
        if (worker := self._workers.pop(index, None)) is None:
            return
        if worker.last_stats is not None:
            self._past = [merged_stats([worker.last_stats, *self._past])]
        counts = [each for each in worker.last_metrics if each.type in ("counter", "histogram", "summary")]
        self._past_metrics = merged_metrics([self._past_metrics, counts])
        await worker.close()

    async def keep_counts(self) -> None:
        """Read all counts now and then, until it is cancelled."""
        while True:
            # Of a worker that dies, only what it counted since the last reading is lost
            await asyncio.sleep(5.0)
            with suppress(TandemError):
                await asyncio.gather(self.stats(), self.metrics())

    async def status(self) -> admin.Status:
        statuses = await self._each(Peer.status)
        return replace(await super().status(), state=merged_state({status.state for status in statuses}))

    async def replicas(self) -> list[ReplicaSnapshot]:
        return merged_replicas(await self._each(Peer.replicas))

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        async with self._changing:
            await self._each(
                lambda worker: worker.drain(address, allow_last_target=allow_last_target), is_change=True
            )
            self.drained.add(address)
        return replica_at(await self.replicas(), address)

    async def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        async with self._changing:
            await self._each(lambda worker: worker.resume(address), is_change=True)
            self.drained.discard(address)
        return replica_at(await self.replicas(), address)

    async def requests(self) -> list[admin.RequestReport]:
        found = chain.from_iterable(await self._each(Peer.requests))
        return sorted(found, key=lambda each: -each.age_seconds)

    async def abort(self, request_id: str, *, reason: str, by: str) -> admin.RequestReport:
        whole_id = (await self.request(request_id)).request_id
        return (await self._each(lambda worker: worker.abort(whole_id, reason)))[0]

    async def stats(self) -> admin.Stats:
        stats = merged_stats(await self._each(Peer.stats), self._past)
        return replace(stats, uptime_seconds=time.monotonic() - self.started)

    async def update_config(
        self, values: Mapping[str, str], reset_names: Collection[str], *, by: str
    ) -> list[admin.ConfigOption]:
        """Change options for new requests, on all workers and on those that start later."""
        took, changed = list[Peer](), list[admin.ConfigOption]()

        async def ask(worker: Peer) -> None:
            await worker.update_config(values, reset_names)
            took.append(worker)

        async with self._changing:
            try:
                if self._workers:
                    await self._each(ask, is_change=True)
            finally:
                if took or not self._workers:
                    changed = await super().update_config(values, reset_names, by=by)
        return changed

    async def metrics(self) -> list[Metric]:
        """The metrics of all workers, those of workers that have ended included."""
        read = await asyncio.gather(*map(Peer.metrics, self._workers.values()))
        text = "Worker processes that take requests."
        count = GaugeMetricFamily("tandem_coordinator_workers", text, len(read))
        return merged_metrics([*read, self._past_metrics, [count]])

    async def metrics_text(self) -> bytes:
        """The same in Prometheus's text form."""
        found = await self.metrics()
        return generate_latest(named(registry_of(lambda: found), self.live_config.current))

    async def _each(
        self, ask: Callable[[Peer], Awaitable[AnswerT]], *, is_change: bool = False
    ) -> Sequence[AnswerT]:
        """The answers of all workers that give one, at least one. A change must be made by all."""
        if not self._workers:
            raise ServiceUnavailableError("no worker takes requests at the moment")
        refusals: list[TandemError] = []

        async def answers(index: int, worker: Peer) -> list[AnswerT]:
            try:
                return [await ask(worker)]
            except TandemError as error:
                # The address means nothing outside.
                sentence = str(error).removeprefix(f"coordinator {worker.address}: ")
                sentence = sentence.replace(worker.address, "its socket")
                if isinstance(error, ServiceUnavailableError):
                    sentence = f"worker {index}: {sentence}"
                refusals.append(type(error)(sentence))
                return []

        found = [*chain.from_iterable(await asyncio.gather(*starmap(answers, self._workers.items())))]
        if not found:
            raise refusals[-1]
        if refusals and is_change:
            count, error = f"{len(refusals)} of {len(found) + len(refusals)} workers", refusals[-1]
            raise type(error)(f"{count} did not make the change, which the others made: {error}")
        return found


def merged_state(states: Collection[admin.CoordinatorState]) -> admin.CoordinatorState:
    """The state of a coordinator whose workers are in these states."""
    if len(states) > 1:
        completes = any(state.completes for state in states)
        return admin.CoordinatorState.DEGRADED if completes else admin.CoordinatorState.UNAVAILABLE
    (state,) = states
    return state


def merged_stats(running: Sequence[admin.Stats], past: Sequence[admin.Stats] = ()) -> admin.Stats:
    """The statistics of workers, at least one of which runs; of the past ones counts are added, load is not."""
    counted = [*running, *past]
    rules = sorted({rule for stats in counted for rule in stats.by_rule})
    # For each load the decision of the worker that has measured it for longest.
    decisions = sorted(
        chain.from_iterable(s.decisions for s in running), key=lambda each: each.measured_seconds
    )
    best = {(each.target, each.rule, each.temperatures, each.load, each.draft): each for each in decisions}
    return replace(
        running[0],
        load=_sum(stats.load for stats in running),
        throughput=_sum(stats.throughput for stats in running),
        outcomes=_sum(stats.outcomes for stats in counted),
        completion_tokens=sum(stats.completion_tokens for stats in counted),
        speculation=summed(stats.speculation for stats in counted),
        by_rule={
            rule: summed(stats.by_rule[rule] for stats in counted if rule in stats.by_rule) for rule in rules
        },
        # That of a worker where a draft proposes, if there is one.
        speculation_state=max((stats.speculation_state for stats in running), key=lambda state: state.is_on),
        decisions=tuple(best[name] for name in sorted(best)),
    )


def merged_replicas(lists: Iterable[Iterable[ReplicaSnapshot]]) -> list[ReplicaSnapshot]:
    """Every replica once: targets first, then drafts, each by address."""
    by_name = defaultdict(list)
    for shot in chain.from_iterable(lists):
        by_name[shot.role is Role.DRAFT, shot.address].append(shot)
    return [
        replace(
            max(shots, key=lambda shot: [*ReplicaState].index(shot.state)),  # the worst
            open_sequences=sum(shot.open_sequences for shot in shots),
            round_trip_seconds=_mean(shot.round_trip_seconds for shot in shots),
            step_seconds=_mean(shot.step_seconds for shot in shots),
            figures=summed(shot.figures for shot in shots),
            model=next((shot.model for shot in shots if shot.model is not None), None),
        )
        for _, shots in sorted(by_name.items())
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def merged_metrics(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """The metrics of several processes as those of one: series with the same labels are added, but see `_JOINED`."""
    merged: dict[str, Metric] = {}
    values = defaultdict(list)
    for metric in chain.from_iterable(processes):
        merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        for sample in metric.samples:
            values[metric.name, sample.name, tuple(sorted(sample.labels.items()))].append(sample.value)
    for (name, sample_name, labels), each in values.items():
        merged[name].add_sample(sample_name, dict(labels), _JOINED.get(name, sum)(each))
    return [*merged.values()]


def _sum(items: Iterable[NumbersT]) -> NumbersT:
    first, *others = items
    return type(first)(*map(sum, zip(*map(astuple, (first, *others)), strict=True)))

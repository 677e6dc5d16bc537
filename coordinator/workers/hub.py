"""The parent's answers for all of its workers: it asks each, and makes one answer of theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc
import grpc.aio

from coordinator.admin.administration import MIN_INTERVAL_SECONDS
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.settings.live import LiveConfig, spelled
from coordinator.workers import metrics
from coordinator.workers.forwarding import metrics_from
from coordinator.workers.merging import merged_diagnosis, merged_replicas, merged_stats, merged_status
from coordinator.workers.metrics import Families, Family
from coordinator.workers.setup import worker_address
from tandem.admin import ConfigOption, Diagnosis, RequestReport, Stats, Status
from tandem.clients.admin import AdminClient
from tandem.errors import InvalidRequestError, NotFoundError, ServiceUnavailableError, TandemError
from tandem.replica import ReplicaSnapshot
from tandem.rpc.channels import open_channel

_PATIENCE_SECONDS = 5.0
_COUNT_SECONDS = 5.0
"""Interval at which counts are read, so that those of a worker that dies are lost only since then."""

AnswerT = TypeVar("AnswerT")


class Worker:
    """A worker that takes requests, as its parent sees it."""

    def __init__(self, address: str) -> None:
        self.admin = AdminClient(address, timeout_seconds=_PATIENCE_SECONDS)
        self._channel = open_channel(address)
        self.stats: Stats | None = None
        """As last read."""
        self.families: Families = {}
        """Metrics as last read."""

    async def read_stats(self) -> Stats:
        """Its statistics now.

        Raises:
            TandemError: it does not answer.
        """
        self.stats = await self.admin.stats()
        return self.stats

    async def read_families(self) -> Families:
        """Its metrics now, or as last read where it does not answer."""
        with suppress(grpc.RpcError):
            text = await metrics_from(self._channel, _PATIENCE_SECONDS)
            self.families = metrics.read(text.decode())
        return self.families

    async def close(self) -> None:
        """Close the connections."""
        await self.admin.close()
        await self._channel.close()


class Hub:
    """Shows and steers all workers of a coordinator. See `Administrator`."""

    def __init__(self, settings: CoordinatorSettings, folder: str) -> None:
        """Begin without workers.

        Args:
            settings: Of the whole coordinator.
            folder: Holds the workers' sockets.
        """
        self._live_config = LiveConfig(settings)
        self._folder = folder
        self._started = time.monotonic()
        self._workers: dict[int, Worker] = {}
        self._past: Stats | None = None
        """Counts of workers that have ended."""
        self._past_families: Families = {}
        self.changes: dict[str, str] = {}
        """Options changed since the start, for workers that start later."""
        self.drained: set[str] = set()
        """Replicas that an operator drained, for workers that start later."""

    def joined(self, index: int) -> None:
        """A worker takes requests from now on."""
        self._workers[index] = Worker(worker_address(self._folder, index))

    async def left(self, index: int) -> None:
        """A worker has ended. What it counted stays in the sums."""
        worker = self._workers.pop(index, None)
        if worker is None:
            return
        if worker.stats is not None:
            self._past = merged_stats([worker.stats], self._past, 0.0)
        self._past_families = metrics.merged([self._past_families, metrics.cumulative(worker.families)])
        await worker.close()

    async def close(self) -> None:
        """Close the connections."""
        for index in list(self._workers):
            await self.left(index)

    async def keep_counts(self) -> None:
        """Read all counts now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            if self._workers:
                with suppress(TandemError):
                    await asyncio.gather(self._each(Worker.read_stats), self.families())

    async def status(self) -> Status:
        """How the coordinator does."""
        statuses = await self._each(lambda worker: worker.admin.status())
        return merged_status(statuses, self._past, self._uptime)

    async def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""
        return merged_replicas(await self._each(lambda worker: worker.admin.replicas()))

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        """Let no worker send new sequences to a replica."""
        await self._each(lambda worker: worker.admin.drain(address, allow_last_target=allow_last_target))
        self.drained.add(address)
        return await self._replica(address)

    async def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        """Let all workers send new sequences to a replica again."""
        await self._each(lambda worker: worker.admin.resume(address))
        self.drained.discard(address)
        return await self._replica(address)

    async def requests(self) -> list[RequestReport]:
        """The requests that run, the oldest first."""
        lists = await self._each(lambda worker: worker.admin.requests())
        return sorted((report for reports in lists for report in reports), key=_age, reverse=True)

    async def request(self, request_id: str) -> RequestReport:
        """The request whose id begins like this."""
        return found_request(await self.requests(), request_id)

    async def abort(self, request_id: str, *, reason: str, by: str) -> RequestReport:
        """End the request whose id begins like this, on the worker that runs it."""
        whole_id = (await self.request(request_id)).request_id
        [report, *_] = await self._each(lambda worker: worker.admin.abort(whole_id, reason))
        return report

    async def stats(self) -> Stats:
        """Counts since the start, those of workers that have ended included."""
        return merged_stats(await self._each(Worker.read_stats), self._past, self._uptime)

    async def watch(self, interval_seconds: float) -> AsyncGenerator[Stats]:
        """Statistics at a fixed interval.

        Raises:
            InvalidRequestError: the interval is too short.
        """
        if not interval_seconds >= MIN_INTERVAL_SECONDS:
            raise InvalidRequestError(
                f"interval_seconds is {interval_seconds:g}; it must be at least {MIN_INTERVAL_SECONDS:g}"
            )
        while True:
            yield await self.stats()
            await asyncio.sleep(interval_seconds)

    async def config(self) -> list[ConfigOption]:
        """Every option with its value and its origin. Bounds are those of the whole."""
        return self._live_config.options()

    async def update_config(
        self, values: Mapping[str, str], reset: Collection[str], *, by: str
    ) -> list[ConfigOption]:
        """Change options for new requests, on all workers and on those that start later."""
        if not values and not reset:
            raise InvalidRequestError("no option is named; name at least one to set or to reset")
        options = self._live_config.change(values, reset, by)
        for name in map(spelled, reset):
            self.changes.pop(name, None)
        self.changes |= {spelled(name): value for name, value in values.items()}
        await self._each(lambda worker: worker.admin.update_config(values, reset))
        return options

    async def diagnose(self) -> Diagnosis:
        """The worst finding of each check."""
        return merged_diagnosis(await self._each(lambda worker: worker.admin.diagnose()))

    async def families(self) -> Families:
        """The metrics of all workers, those of workers that have ended included."""
        workers = list(self._workers.values())
        read = await asyncio.gather(*(worker.read_families() for worker in workers))
        count = Family(
            "Worker processes that take requests.",
            "gauge",
            {("tandem_coordinator_workers", ()): float(len(workers))},
        )
        return metrics.merged([*read, self._past_families, {"tandem_coordinator_workers": count}])

    async def metrics_text(self) -> bytes:
        """The same in Prometheus's text form."""
        return metrics.to_text(await self.families())

    @property
    def _uptime(self) -> float:
        return time.monotonic() - self._started

    async def _replica(self, address: str) -> ReplicaSnapshot:
        for replica in await self.replicas():
            if replica.address == address:
                return replica
        raise NotFoundError(f"there is no replica {address!r}")

    async def _each(self, ask: Callable[[Worker], Awaitable[AnswerT]]) -> Sequence[AnswerT]:
        """The answers of all workers that give one, at least one.

        Raises:
            TandemError: none does; the first worker's error.
        """
        workers = list(self._workers.values())
        results = await asyncio.gather(*map(ask, workers), return_exceptions=True)
        answers: list[AnswerT] = []
        errors: list[TandemError] = []
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, TandemError):
                # The address means nothing outside.
                plain = str(result).removeprefix(f"coordinator {worker.admin.address}: ")
                errors.append(type(result)(plain))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result)
        if not answers:
            raise errors[0] if errors else ServiceUnavailableError("no worker takes requests at the moment")
        return answers


def found_request(reports: Sequence[RequestReport], beginning: str) -> RequestReport:
    """The request whose id begins like this.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: there are several, or nothing was given.
    """
    if not beginning:
        raise InvalidRequestError("request_id is empty; it must be an id, or the beginning of one")
    found = [report for report in reports if report.request_id.startswith(beginning)]
    exact = [report for report in found if report.request_id == beginning]
    if not found:
        raise NotFoundError(f"no request that runs has an id that begins with {beginning}")
    if len(found) > 1 and not exact:
        raise InvalidRequestError(
            f"{len(found)} requests that run have an id that begins with {beginning}; give more of it"
        )
    return (exact or found)[0]


def _age(report: RequestReport) -> float:
    return report.age_seconds

"""Administration: what a coordinator tells of itself, and what it can be told. `tandem admin` is its other end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from coordinator.acceptance import configured_options
from coordinator.completions import Completions
from coordinator.diagnosis import diagnose
from coordinator.figures import add
from coordinator.live_config import LiveConfig
from coordinator.rejection.resolution import named_strategy
from coordinator.requests import ActiveRequest
from tandem import __version__
from tandem.admin import (
    ConfigOption,
    CoordinatorState,
    Diagnosis,
    Load,
    RequestReport,
    SpeculationSettings,
    Stats,
    Status,
    Throughput,
)
from tandem.errors import InvalidRequestError, NotFoundError
from tandem.replica import ReplicaSnapshot, ReplicaState, Role, is_last_target
from tandem.types import SpeculationFigures

logger = logging.getLogger(__name__)

LEAST_INTERVAL_SECONDS = 0.1
"""Between two statistics of one watch."""


class ReplicaPool(Protocol):
    """The replicas that the coordinator keeps in touch with."""

    def snapshots(self) -> list[ReplicaSnapshot]:
        """All of them at this moment."""

    def drain(self, role: Role, address: str) -> None:
        """Give a replica no new sequences."""

    def resume(self, role: Role, address: str) -> None:
        """Give a replica new sequences again."""


class Administration:
    """Shows and steers a coordinator."""

    def __init__(self, completions: Completions, live_config: LiveConfig, replicas: ReplicaPool) -> None:
        self._completions = completions
        self._live_config = live_config
        self._replicas = replicas
        self._started = time.monotonic()

    def status(self) -> Status:
        """How the coordinator does."""
        replicas = self.replicas()
        settings = self._live_config.current
        has_draft = any(replica.role is Role.DRAFT for replica in replicas)
        return Status(
            version=__version__,
            state=state_of(replicas),
            time=datetime.now(UTC),
            uptime_seconds=self._uptime,
            model=next((replica.model.name for replica in replicas if replica.model is not None), ""),
            load=self._load,
            throughput=self._throughput,
            speculation=self._figures()[0],
            settings=SpeculationSettings(
                is_on=settings.speculation and has_draft,
                num_speculative_tokens=settings.num_speculative_tokens,
                rule=named_strategy(configured_options(settings)).name,
            ),
            replicas=tuple(replicas),
        )

    def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""
        return sorted(self._replicas.snapshots(), key=lambda shot: (shot.role is Role.DRAFT, shot.address))

    def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        """Let a replica finish what it has, and give it nothing new.

        Args:
            address: As `replicas` tells it.
            allow_last_target: Whether it may be the last target that takes new sequences.
            by: Who wants it, for the log.

        Raises:
            NotFoundError: there is no such replica.
            InvalidRequestError: it is the last target, and that was not allowed.
        """
        replicas = self.replicas()
        replica = _find(replicas, address)
        if is_last_target(replica, replicas) and not allow_last_target:
            raise InvalidRequestError(
                f"{address} is the last target that takes new sequences; without it requests wait and then fail"
            )
        self._replicas.drain(replica.role, replica.address)
        logger.info("replica drained", extra={"role": replica.role.value, "address": address, "by": by})
        return _find(self.replicas(), address)

    def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        """Give a replica new sequences again.

        Raises:
            NotFoundError: there is no such replica.
        """
        replica = _find(self.replicas(), address)
        self._replicas.resume(replica.role, replica.address)
        logger.info("replica resumed", extra={"role": replica.role.value, "address": address, "by": by})
        return _find(self.replicas(), address)

    def requests(self) -> list[RequestReport]:
        """The requests that run, the oldest first."""
        return [_report(request) for request in self._completions.requests.list()]

    def request(self, request_id: str) -> RequestReport:
        """The one whose id begins so.

        Raises:
            NotFoundError: none does.
            InvalidRequestError: several do.
        """
        return _report(self._completions.requests.find(request_id))

    def abort(self, request_id: str, *, reason: str, by: str) -> RequestReport:
        """End the request whose id begins so.

        Raises:
            NotFoundError: none does.
            InvalidRequestError: several do.
        """
        request = self._completions.requests.find(request_id)
        report = _report(request)  # before it lets go of its draft and its target
        request.abort(reason)
        logger.info("request aborted", extra={"request_id": request.request_id, "reason": reason, "by": by})
        return report

    def stats(self) -> Stats:
        """What was done since the start."""
        total, by_rule = self._figures()
        return Stats(
            time=datetime.now(UTC),
            uptime_seconds=self._uptime,
            load=self._load,
            throughput=self._throughput,
            outcomes=self._completions.requests.outcomes,
            completion_tokens=self._completions.requests.tokens.total,
            speculation=total,
            by_rule=by_rule,
        )

    async def watch(self, interval_seconds: float) -> AsyncGenerator[Stats]:
        """The same, again and again.

        Raises:
            InvalidRequestError: the interval is too short.
        """
        if not interval_seconds >= LEAST_INTERVAL_SECONDS:
            raise InvalidRequestError(
                f"interval_seconds is {interval_seconds:g}; it must be at least {LEAST_INTERVAL_SECONDS:g}"
            )
        while True:
            yield self.stats()
            await asyncio.sleep(interval_seconds)

    def config(self) -> list[ConfigOption]:
        """Every option, its value and where that comes from."""
        return self._live_config.options()

    def update_config(
        self, values: Mapping[str, str], reset: Collection[str], *, by: str
    ) -> list[ConfigOption]:
        """Change options for the requests that come next; see `LiveConfig.change`.

        Raises:
            InvalidRequestError: with a sentence for each option that cannot be changed, or not so.
        """
        if not values and not reset:
            raise InvalidRequestError("no option is named; name at least one to set or to reset")
        return self._live_config.change(values, reset, by)

    def diagnose(self) -> Diagnosis:
        """What is wrong, and what to do about it."""
        status = self.status()
        return Diagnosis(status.version, status.time, tuple(diagnose(status, self._live_config.current)))

    @property
    def _uptime(self) -> float:
        return time.monotonic() - self._started

    @property
    def _load(self) -> Load:
        return Load(len(self._completions.requests.list()), self._completions.admission.queued)

    @property
    def _throughput(self) -> Throughput:
        tokens = self._completions.requests.tokens
        return Throughput(tokens.rate(10), tokens.rate(60))

    def _figures(self) -> tuple[SpeculationFigures, dict[str, SpeculationFigures]]:
        """What speculation did, in all and for each rule, the requests that run included."""
        total, by_rule = SpeculationFigures(), defaultdict[str, SpeculationFigures](SpeculationFigures)
        ended = self._completions.figures.cumulative.by_rule
        running = [
            (request.rule, request.completion.figures) for request in self._completions.requests.list()
        ]
        for rule, figures in [*ended.items(), *running]:
            add(total, figures)
            add(by_rule[rule], figures)
        return total, dict(by_rule)


def state_of(replicas: Sequence[ReplicaSnapshot]) -> CoordinatorState:
    """Whether a coordinator with these replicas can complete requests."""
    targets = [replica for replica in replicas if replica.role is Role.TARGET]
    drafts = [replica for replica in replicas if replica.role is Role.DRAFT]
    if not any(replica.state is ReplicaState.READY for replica in targets):
        was_met = any(replica.model is not None for replica in targets)
        return CoordinatorState.UNAVAILABLE if was_met else CoordinatorState.STARTING
    is_lost = any(replica.state not in (ReplicaState.READY, ReplicaState.DRAINING) for replica in replicas)
    has_drafter = not drafts or any(replica.state is ReplicaState.READY for replica in drafts)
    return CoordinatorState.READY if has_drafter and not is_lost else CoordinatorState.DEGRADED


def _find(replicas: Sequence[ReplicaSnapshot], address: str) -> ReplicaSnapshot:
    found = next((replica for replica in replicas if replica.address == address), None)
    if found is None:
        known = ", ".join(replica.address for replica in replicas) or "none"
        raise NotFoundError(f"there is no replica {address!r}; there are: {known}")
    return found


def _report(request: ActiveRequest) -> RequestReport:
    return RequestReport(
        request_id=request.request_id,
        age_seconds=time.monotonic() - request.started,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        rule=request.rule,
        num_speculative_tokens=request.num_speculative_tokens,
        draft_address=request.draft_address,
        target_address=request.target_address,
        speculation=request.completion.figures,
    )

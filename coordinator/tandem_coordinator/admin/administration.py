"""Administration of a coordinator, as `tandem admin` uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import TypeVar

from tandem import __version__
from tandem.acceptance.strategies import find_strategy, for_draft
from tandem.config.names import AUTO
from tandem.errors import InvalidRequestError, NotFoundError
from tandem.model import admin
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role, is_last_target, replica_at
from tandem_coordinator.admin.diagnosis import diagnose
from tandem_coordinator.replicas.registry import ReplicaRegistry
from tandem_coordinator.requests.plan import names_auto
from tandem_coordinator.requests.runner import ActiveRequest, RequestRunner
from tandem_coordinator.settings.live import LiveConfig
from tandem_coordinator.speculation_report import advise, describe_decisions, of_coordinator

logger = logging.getLogger(__name__)

MIN_INTERVAL_SECONDS = 0.1
"""Between two statistics of one watch."""


class Administration:
    """Shows and steers a coordinator. `AdminServicer` names the verbs."""

    def __init__(
        self, completions: RequestRunner, live_config: LiveConfig, replicas: ReplicaRegistry
    ) -> None:
        self.live_config = live_config
        self.started = time.monotonic()
        self._completions = completions
        self._replicas = replicas

    async def status(self) -> admin.Status:
        """State, load and replicas at this moment."""
        replicas = await self.replicas()
        stats = await self.stats()
        settings = self.live_config.current
        models = [each.model for each in replicas if each.model is not None]
        drafts = [each for each in replicas if each.role is Role.DRAFT]
        fleet = self._replicas.fleet
        options = for_draft(settings, fleet.draft)
        shared = {each.name for each in fields(admin.Status)} & {each.name for each in fields(admin.Stats)}
        return admin.Status(
            version=__version__,
            state=state_of(replicas),
            model=models[0].name if models else "",
            settings=admin.SpeculationSettings(
                is_on=settings.speculation and (bool(drafts) or fleet.draft is not None),
                num_speculative_tokens=settings.num_speculative_tokens,
                rule=AUTO if names_auto(settings) else find_strategy(options.acceptance_rule).name,
            ),
            sampling_defaults=fleet.sampling_defaults,
            replicas=tuple(replicas),
            **{name: getattr(stats, name) for name in shared},
        )

    async def replicas(self) -> list[ReplicaSnapshot]:
        """Every replica: targets first, then drafts, each by address."""
        return sorted(self._replicas.snapshots(), key=lambda shot: (shot.role is Role.DRAFT, shot.address))

    async def drain(self, address: str, *, allow_last_target: bool, by: str) -> ReplicaSnapshot:
        replicas = await self.replicas()
        replica = replica_at(replicas, address)
        if is_last_target(replica, replicas) and not allow_last_target:
            raise InvalidRequestError(
                f"{address} is the last target that takes new sequences; without it requests wait and then fail"
            )
        self._replicas.pool(replica.role).drain(replica.address)
        logger.info("replica drained", extra={"role": replica.role.value, "address": address, "by": by})
        return replica_at(await self.replicas(), address)

    async def resume(self, address: str, *, by: str) -> ReplicaSnapshot:
        replica = replica_at(await self.replicas(), address)
        self._replicas.pool(replica.role).resume(replica.address)
        logger.info("replica resumed", extra={"role": replica.role.value, "address": address, "by": by})
        return replica_at(await self.replicas(), address)

    async def requests(self) -> list[admin.RequestReport]:
        """The requests that run, the oldest first."""
        return [_report(request) for request in self._completions.requests.list()]

    async def abort(self, request_id: str, *, reason: str, by: str) -> admin.RequestReport:
        request = found_request(self._completions.requests.list(), request_id)
        report = _report(request)  # before the request leaves its draft and its target
        request.abort(reason)
        logger.info("request aborted", extra={"request_id": request.request_id, "reason": reason, "by": by})
        return report

    async def stats(self) -> admin.Stats:
        """Statistics since the start."""
        completions = self._completions
        settings = self.live_config.current
        tokens = completions.requests.tokens
        total, by_rule = completions.stats.snapshot()
        return admin.Stats(
            time=datetime.now(UTC),
            uptime_seconds=time.monotonic() - self.started,
            load=admin.Load(len(completions.requests.list()), completions.admission.queued),
            throughput=admin.Throughput(tokens.rate(10), tokens.rate(60)),
            outcomes=completions.requests.outcomes,
            completion_tokens=tokens.total,
            speculation=total,
            by_rule=by_rule,
            speculation_state=of_coordinator(
                await self.replicas(),
                is_enabled=settings.speculation,
                num_speculative_tokens=settings.num_speculative_tokens,
                latest=completions.speculation_state,
            ),
            decisions=tuple(describe_decisions(completions.speculation)),
        )

    async def request(self, request_id: str) -> admin.RequestReport:
        return found_request(await self.requests(), request_id)

    async def watch(self, interval_seconds: float) -> AsyncGenerator[admin.Stats]:
        if not interval_seconds >= MIN_INTERVAL_SECONDS:
            raise InvalidRequestError(
                f"interval_seconds is {interval_seconds:g}; it must be at least {MIN_INTERVAL_SECONDS:g}"
            )
        while True:
            yield await self.stats()
            await asyncio.sleep(interval_seconds)

    async def config(self) -> list[admin.ConfigOption]:
        return self.live_config.options()

    async def update_config(
        self, values: Mapping[str, str], reset_names: Collection[str], *, by: str
    ) -> list[admin.ConfigOption]:
        if not values and not reset_names:
            raise InvalidRequestError("no option is named; name at least one to set or to reset")
        return self.live_config.change(values, reset_names, by)

    async def diagnose(self) -> admin.Diagnosis:
        status = await self.status()
        advice = advise(self._completions.speculation)
        findings = diagnose(status, self.live_config.current, advice)
        return admin.Diagnosis(status.version, status.time, tuple(findings))


RequestT = TypeVar("RequestT", ActiveRequest, admin.RequestReport)


def found_request(requests: Sequence[RequestT], beginning: str) -> RequestT:
    """The only request whose id begins like this, or the one with exactly this id."""
    if not beginning:
        raise InvalidRequestError("request_id is empty; it must be an id, or the beginning of one")
    found = [request for request in requests if request.request_id.startswith(beginning)]
    exact = [request for request in found if request.request_id == beginning]
    if not found:
        raise NotFoundError(f"no request that runs has an id that begins with {beginning}")
    if len(found) > 1 and not exact:
        raise InvalidRequestError(
            f"{len(found)} requests that run have an id that begins with {beginning}; give more of it"
        )
    return (exact or found)[0]


def state_of(replicas: Sequence[ReplicaSnapshot]) -> admin.CoordinatorState:
    """State of a coordinator with these replicas."""
    targets = [replica for replica in replicas if replica.role is Role.TARGET]
    drafts = [replica for replica in replicas if replica.role is Role.DRAFT]
    if not any(replica.state is ReplicaState.READY for replica in targets):
        was_met = any(replica.model is not None for replica in targets)
        return admin.CoordinatorState.UNAVAILABLE if was_met else admin.CoordinatorState.STARTING
    is_lost = any(replica.state not in (ReplicaState.READY, ReplicaState.DRAINING) for replica in replicas)
    has_drafter = not drafts or any(replica.state is ReplicaState.READY for replica in drafts)
    return admin.CoordinatorState.READY if has_drafter and not is_lost else admin.CoordinatorState.DEGRADED


def _report(request: ActiveRequest) -> admin.RequestReport:
    return admin.RequestReport(
        request_id=request.request_id,
        age_seconds=time.monotonic() - request.started,
        prompt_tokens=len(request.plan.prompt),
        completion_tokens=request.completion_tokens,
        rule=request.plan.rule.name,
        num_speculative_tokens=request.plan.num_speculative_tokens,
        draft_address=request.draft.address,
        target_address=request.target.address,
        speculation=request.stats,
        speculation_state=request.speculation_state,
    )

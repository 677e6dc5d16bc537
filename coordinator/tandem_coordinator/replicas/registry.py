"""All known replicas of both roles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tandem.errors import IncompatibleModelsError, ServiceUnavailableError
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.types import Coverage, ModelInfo
from tandem.rpc.addresses import Resolver, resolve, split_addresses
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.telemetry.logs import log_fault
from tandem_coordinator.decoding.tokenization import TOKENIZER_FILE
from tandem_coordinator.replicas.compatibility import (
    Deployment,
    Fleet,
    check_coverage,
    check_models,
    needs_mapping,
)
from tandem_coordinator.replicas.hangs import VerificationTimes
from tandem_coordinator.replicas.pool import ClientT, Pool
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.settings.sampling import SamplingPolicy
from tandem_coordinator.stats.rounds import RoundEnded
from tandem_coordinator.telemetry.observer import ReplicaEngine
from tandem_coordinator.transport.draft_client import DraftClient
from tandem_coordinator.transport.target_client import TargetClient

logger = logging.getLogger(__name__)


class ReplicaRegistry:
    """Both pools, and what operators do with their members."""

    def __init__(
        self, settings: CoordinatorSettings, credentials: Credentials = PLAIN, resolver: Resolver = resolve
    ) -> None:
        has_drafts = bool(settings.draft_address)
        self.fleet = fleet = Fleet(settings, SamplingPolicy(settings), takes_heads=not has_drafts)
        self._settings = settings
        self.targets = Pool(
            Role.TARGET,
            split_addresses(settings.target_address),
            settings.resolve_interval_seconds,
            TargetClient,
            fleet.judge_target,
            credentials,
            lambda: fleet.message_limit_bytes,
            resolver,
            VerificationTimes(settings.verification_timeout_seconds),
            outdated=fleet.outdated_because,
        )
        self.drafts = Pool(
            Role.DRAFT,
            split_addresses(settings.draft_address or ""),
            settings.resolve_interval_seconds,
            DraftClient,
            self._judge_draft,
            credentials,
            lambda: fleet.message_limit_bytes,
            resolver,
            map_vocabulary=self._map_vocabulary,
        )
        """Has no members when the target works alone."""
        self._watching: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        """Asks for statistics."""

    async def start(self, waits: Callable[[str], None] = lambda _: None) -> None:
        """Return once there is a target and, where drafts are configured, a matching draft or none in time."""
        await self.targets.start()
        self._watching = asyncio.create_task(self._watch_for_hangs())
        await self._first(self.targets, self._settings.start_timeout_seconds, waits)
        assert self.fleet.target is not None
        if self.drafts.addresses:
            await self.drafts.start()
            seconds = self._settings.start_timeout_seconds
            alone = self._settings.start_without_draft
            try:
                await self._first(self.drafts, min(seconds, alone), waits)
            except ServiceUnavailableError as error:
                if seconds <= alone:
                    raise
                logger.warning("the target serves alone until a draft is ready", extra={"reason": str(error)})
        else:
            check_models(Deployment(self._settings, self.fleet.target, self.fleet.draft))

    async def _map_vocabulary(self, client: DraftClient, draft: ModelInfo) -> Coverage | None:
        """Give a draft the target's tokenizer, where it has another one."""
        target = self.fleet.target
        member = self.targets.choose()
        assert target is not None, "drafts are reached after the first target"
        if not needs_mapping(draft, target):
            return None
        if member is None:
            raise ServiceUnavailableError("no target is there to ask for its tokenizer")
        files = await member.client.tokenizer_files()
        coverage = await client.map_vocabulary(target, files.get(TOKENIZER_FILE, b""))
        check_coverage(self._settings, draft, coverage)
        return coverage

    def _judge_draft(self, info: ModelInfo) -> str:
        alive = (
            ReplicaState.READY,
            ReplicaState.DRAINING,
        )  # a replica that is being met is not: it is judged as new
        has_others = any(each.state in alive for each in self.drafts.members.values())
        return self.fleet.judge_draft(info, has_others=has_others)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._asking is not None:
            await self._asking
        await asyncio.gather(self.targets.close(), self.drafts.close())

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [*self.targets.snapshots(), *self.drafts.snapshots()]

    async def ask_for_statistics(self) -> None:
        """Ask every replica what its engine counts by now. Those who want to know at the same time share an answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all_for_statistics())
        await asyncio.shield(self._asking)

    async def _ask_all_for_statistics(self) -> None:
        asking = [target.ask_for_statistics() for target in self.targets.members.values()]
        asking += [draft.ask_for_statistics() for draft in self.drafts.members.values()]
        await asyncio.gather(*asking)

    def engines(self) -> dict[tuple[Role, str], ReplicaEngine]:
        """The latest figures of the engines, with their counts since they were met, by role and address."""
        found = {}
        for role in Role:
            for address, member in self.pool(role).members.items():
                if (statistics := member.engine.statistics) is not None:
                    found[role, address] = ReplicaEngine(member.number, statistics)
        return found

    def round_ended(self, result: RoundEnded) -> None:
        target = self.targets.members.get(result.target_address or "")
        if target is not None:
            target.tally.add_round(result)
        draft = self.drafts.members.get(result.draft_address or "") if result.is_drafted else None
        if draft is not None:
            draft.tally.add_round(result)

    def pool(self, role: Role) -> Pool[TargetClient] | Pool[DraftClient]:
        return self.targets if role is Role.TARGET else self.drafts

    async def _watch_for_hangs(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            try:
                self._look_after_steps()
            except Exception as error:  # noqa: BLE001 - the next look may do better
                log_fault(logger, "hangs cannot be looked for", error)

    def _look_after_steps(self) -> None:
        targets = self.targets.members.values()
        for target in targets:
            could_move = any(other.is_ready for other in targets if other is not target)
            # A target that is only slow may answer after all, so a sequence that could not move stays longer.
            target.look_after_steps(0.0 if could_move else self._settings.target_wait_seconds)

    async def _first(self, pool: Pool[ClientT], seconds: float, waits: Callable[[str], None]) -> None:
        """Wait until one is ready, or one turns out to be incompatible."""
        where = f"the {pool.role.value} service at {', '.join(map(str, pool.addresses))}"
        if pool.choose() is None:
            waits(f"{where}, for up to {seconds:g} s")
        try:
            async with asyncio.timeout(seconds):
                while pool.choose() is None:
                    for shot in pool.snapshots():
                        if shot.state is ReplicaState.INCOMPATIBLE:
                            raise IncompatibleModelsError(shot.reason)
                    await pool.change()
        except TimeoutError:
            raise ServiceUnavailableError(
                f"{where} was not ready within {seconds:g} s; "
                f"start it, or name another with --{pool.role.value}-address: {pool.reasons()}"
            ) from None

"""Opens a request's drafter and its verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from coordinator.decoding.tokenization import PromptEncoder
from coordinator.failover.drafter import FailoverDrafter
from coordinator.failover.verifier import FailoverVerifier
from coordinator.replicas.registry import ReplicaRegistry
from coordinator.requests.active import ActiveRequest
from coordinator.requests.plan import Plan
from coordinator.speculation import report as speculation_report
from coordinator.speculation.controller import SpeculationController
from coordinator.speculation.kinds import request_kind
from coordinator.speculation.request import Decision, RequestSpeculation
from coordinator.speculation.round_timings import RoundTimings
from coordinator.telemetry.observer import EventValue, RequestObserver
from coordinator.transport.draft_client import NoDrafter
from coordinator.transport.proposal_checks import DraftLimits
from coordinator.transport.target_client import RowChoice
from tandem.rpc.deadline import Deadline
from tandem.telemetry import attributes as names
from tandem.types import DraftOptions, ModelInfo, TargetOptions


@dataclass(frozen=True, slots=True)
class Services:
    """The services and models that a request uses."""

    replicas: ReplicaRegistry
    target_info: ModelInfo
    draft_info: ModelInfo | None
    """None when the target works alone. A draft that is away for a while still counts in the checks of requests."""
    encoder: PromptEncoder

    @property
    def draft_name(self) -> str:
        """Name of the draft's model; empty without one."""
        return "" if self.draft_info is None else self.draft_info.name


@dataclass(frozen=True, slots=True)
class Run:
    """A request that runs: what its drafter and its verifier share."""

    plan: Plan
    observer: RequestObserver
    active: ActiveRequest
    timings: RoundTimings
    deadline: Deadline
    speculation: RequestSpeculation | None
    """Decides how much each round proposes; None where the target works alone."""
    client: str = ""
    """Address of the client, whose sequences share places fairly with those of others; empty: not known."""


def open_speculation(
    services: Services, controller: SpeculationController, plan: Plan
) -> RequestSpeculation | None:
    """The request's part of the controller; None where the target works alone."""
    if not services.replicas.drafts.addresses or plan.num_speculative_tokens == 0:
        return None
    kind = request_kind(services.draft_name, plan.rule.name, plan.sampling.temperature)
    speculation = controller.request(
        kind,
        plan.num_speculative_tokens,
        is_adaptive=plan.is_adaptive,
        draft_ahead=plan.draft_ahead,
    )
    # The request has no target yet: begin with the cost model of the one that it is likely to get.
    target = services.replicas.targets.choose()
    speculation.target = "" if target is None else target.address
    return speculation


def open_drafter(
    services: Services, run: Run, running_requests: Callable[[], int]
) -> FailoverDrafter | NoDrafter:
    """The drafter of a request.

    Args:
        services: The services to use.
        run: The request.
        running_requests: Says how many requests run now.
    """
    plan, drafts, speculation = run.plan, services.replicas.drafts, run.speculation
    if speculation is None:
        return NoDrafter(_why_alone(services, plan))
    strategy = plan.rule.strategy
    options = DraftOptions(
        request_id=plan.request_id,
        sampling=plan.sampling,
        max_length=len(plan.prompt) + plan.limits.max_tokens,
        row_kind=strategy.draft_row_kind,
        draft_top_k=plan.draft_top_k,
        with_token_logits=strategy.needs_token_logits,
        ahead=speculation.ahead.max_budget(plan.num_speculative_tokens),
        client=run.client,
    )
    limits = DraftLimits(
        plan.num_speculative_tokens,
        services.target_info.vocabulary_size,
        keeps_proposals=plan.keeps_proposals,
    )
    run.observer.deciding(lambda: _described(speculation.decision))
    load = partial(_load, services, run.active, running_requests)
    return FailoverDrafter(drafts, options, limits, run.active, run.observer, run.timings, speculation, load)


def open_verifier(services: Services, run: Run) -> FailoverVerifier:
    """The verifier of a request."""
    plan = run.plan
    options = TargetOptions(
        request_id=plan.request_id,
        sampling=plan.sampling,
        max_length=len(plan.prompt) + plan.limits.max_tokens,
        prompt_length=len(plan.prompt),
        adjustments=plan.adjustments,
        client=run.client,
    )
    rows = RowChoice(
        plan.rule.row_kind(plan.request.row_kind),
        plan.rule.supports,
        services.target_info.vocabulary_size,
        plan.rule.needs_statistics,
        plan.rule.strategy.races_recovery,
        plan.rule.accept_many,
    )
    return FailoverVerifier(
        services.replicas.targets,
        options,
        rows,
        run.active,
        run.observer,
        run.timings,
        run.deadline,
        plan.target_wait_seconds,
    )


def _why_alone(services: Services, plan: Plan) -> str:
    if not services.replicas.drafts.addresses:
        return speculation_report.NO_DRAFT
    return speculation_report.NOT_ASKED if plan.is_speculation_enabled else speculation_report.DISABLED


def _load(services: Services, active: ActiveRequest, running_requests: Callable[[], int]) -> int:
    """Sequences that share the request's target; before it has one, its share of all that run."""
    targets = services.replicas.targets
    member = targets.member(active.target_address) if active.target_address else None
    if member is not None:
        return member.open_sequences
    ready = sum(member.is_ready for member in targets.members)
    return -(-running_requests() // max(ready, 1))


def _described(decision: Decision) -> dict[str, EventValue]:
    """A decision as attributes of a span."""
    return {
        names.DECISION_TOKENS: decision.tokens,
        names.DECISION_LOAD: decision.load,
        names.DECISION_GAIN: round(decision.gain, 3),
    }

"""Tandem's own loop with both models in one process and no gRPC: the floor for what the split costs.

`tandem_coordinator.rounds.session.RoundSession` with the services' own proposer and verifier, called directly instead
of over gRPC.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.contenders import requests_of
from benchmarks.pace import Pace
from benchmarks.peers import PHASES, Answer, Outcome, Run, Workload, serve
from tandem.config.settings import load_settings
from tandem.model.types import (
    DraftedOutcomes,
    GenerationRequest,
    Lead,
    OwnHead,
    Proposal,
    ProposeStep,
    SpeculationStats,
    Verification,
)
from tandem.serving.scopes import CallerScopes
from tandem.serving.server import set_start_aside
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.decoding.tokenization import PromptEncoder
from tandem_coordinator.outcomes import AWAY, IDLE, Away, Coming, Idle
from tandem_coordinator.replicas.compatibility import head_of
from tandem_coordinator.requests.plan import Models, Plan, make_plan
from tandem_coordinator.rounds.draft_side import NoDraft
from tandem_coordinator.rounds.events import RequestEvents
from tandem_coordinator.rounds.question import Asked
from tandem_coordinator.rounds.session import RoundSession, SessionPolicy, TargetAlone
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.stats.rounds import RoundEnded, RoundPlan, RoundTally
from tandem_coordinator.stats.speculation import add
from tandem_coordinator.telemetry.observer import RequestObserver
from tandem_coordinator.transport.streams import RemoteSequence
from tandem_draft.proposers import DraftedSequence
from tandem_draft.proposers.standalone import StandaloneProposer, load_standalone
from tandem_draft.settings import DraftSettings
from tandem_target.loading import load_verifier
from tandem_target.settings import TargetSettings
from tandem_target.verifier import VerifiedSequence, Verifier


class LocalDraft:
    """The draft of a request, in this process. The first round only lets it read the prompt."""

    address: str | None = None
    is_ahead = False
    usual_seconds = 0.0

    def __init__(self, drafted: DraftedSequence) -> None:
        self._drafted = drafted
        self._knows = RemoteSequence()
        self._reading: asyncio.Task[Proposal] | None = None

    def limit(self, completion: Completion, tokens: int) -> int:
        return tokens

    def rest(self, completion: Completion, plan: RoundPlan) -> None: ...

    def outcome(self, completion: Completion) -> Idle | Away:
        if self._reading is None:
            self._reading = asyncio.create_task(self._step(completion, 0))
            return AWAY
        return IDLE

    async def wait_for(self, completion: Completion, coming: Coming, tokens: int) -> Proposal:
        return coming.proposal

    async def ask(self, completion: Completion, tokens: int, plan: RoundPlan) -> Asked:
        if self._reading is not None:
            await self._reading
        return Asked(await self._step(completion, tokens))

    def draft_ahead_of(self, completion: Completion, proposal: Proposal, plan: RoundPlan) -> None: ...

    async def finish(self) -> None:
        """Let the prompt be read to its end before the sequence goes."""
        if self._reading is not None:
            await self._reading

    async def _step(self, completion: Completion, tokens: int) -> Proposal:
        step = ProposeStep(self._knows.delta_to(completion.token_ids), tokens)
        return await self._drafted.propose(step) or Proposal(completion.length)


class LocalTarget:
    """The target of a request, in this process."""

    address: str | None = None
    has_read = False

    def __init__(self, verified: VerifiedSequence, plan: Plan) -> None:
        self._verified = verified
        self._plan = plan
        self._knows = RemoteSequence()
        self.has_head = plan.asks_head

    async def verify(self, completion: Completion, asked: Proposal | OwnHead, lead: Lead) -> Verification:
        rule = self._plan.rule
        kind = self._plan.row_kind
        if isinstance(asked, Proposal):
            delta = self._knows.delta_to(completion.token_ids, asked.token_ids)
            return await self._verified.verify(rule.step(delta, asked, kind))
        delta = self._knows.delta_to(completion.token_ids, with_last=True)
        verification = await self._verified.verify(rule.own_step(delta, kind, 0, 0, asked.max_tokens))
        if verification.proposal is not None:
            self._knows.extend(verification.proposal.token_ids)
        return verification

    def find_led(self, completion: Completion) -> None:
        return None

    def pass_on(self, outcomes: DraftedOutcomes) -> None: ...


class Fixed(TargetAlone):
    """Has each round propose as many tokens as were set."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def begin_round(self, load: int, target_address: str | None) -> RoundPlan:
        return RoundPlan(self._tokens)


def count_one(target_address: str | None) -> int:
    """As if each sequence had the target to itself: nothing is decided by it."""
    return 1


def _load_models(setup: dict[str, Any]) -> tuple[Verifier, StandaloneProposer | None]:
    """The target, and the draft; None where the target's own head proposes."""
    shared = {name: setup[name] for name in ("device", "dtype", "max_sequences", "max_length", "threads")}
    shared["enable_prefix_caching"] = False  # as in the services
    shared["engine"] = "tandem"  # vLLM runs one model in a process
    pace = Pace.from_text(setup["pace"]) if setup["pace"] else None
    on_steps = [None if pace is None else pace.paced(role) for role in ("target", "draft")]
    head = Path(setup["own_head"]) if setup["own_head"] else None
    target = load_verifier(
        TargetSettings(**shared, model=Path(setup["target"]), draft_model=head),
        on_steps[0],
        on_head_step=on_steps[1],
    )
    draft = None
    if head is None:
        draft = load_standalone(DraftSettings(**shared, model=Path(setup["draft"])), on_steps[1])
    return target, draft


def _settings(setup: dict[str, Any]) -> CoordinatorSettings:
    words = (
        "--target-address",
        "127.0.0.1:1",
        "--num-speculative-tokens",
        str(setup["num_speculative_tokens"]),
    )
    rule = ("--rejection-sampling-strategy", setup["rule"]) if setup["rule"] else ()
    return load_settings(CoordinatorSettings, (*words, *rule, *setup["options"]), "one-process")


def load(setup: dict[str, Any]) -> Run:
    """Load both models into this process. Setup: see `benchmarks.contenders.Setup.as_json`."""
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    target, draft = _load_models(setup)
    settings = _settings(setup)
    scopes = CallerScopes().of(address="this process")
    encoder = PromptEncoder(Tokenizer.from_file(str(Path(setup["target"]) / "tokenizer.json")))

    async def start() -> None:
        await target.start()
        if draft is not None:
            await draft.start()

    async def run(workload: Workload) -> Outcome:
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        stats = SpeculationStats()
        info = target.model_info
        served = Models(info, head_of(info) if draft is None else draft.model_info, encoder)
        started = time.perf_counter()

        async def one(request: GenerationRequest) -> Answer:
            plan = await make_plan(request, uuid.uuid4().hex, settings, served, scopes)
            completion = plan.begin()
            answer = Answer()
            tally = RoundTally()
            known = completion.length
            proposed_before = False

            def note_phases(ended: RoundEnded) -> None:
                nonlocal proposed_before
                # The first one waits until the draft has read the prompt
                if ended.proposed and proposed_before:
                    for phase, spent in ended.times.phases.items():
                        phases[phase].append(spent)
                proposed_before |= ended.proposed > 0

            async with AsyncExitStack() as sequences:
                local: LocalDraft | NoDraft = NoDraft(None)
                if draft is not None:
                    options = replace(plan.draft_options(), scope=scopes.prefix)
                    local = LocalDraft(await sequences.enter_async_context(draft.sequence(options)))
                verified = await sequences.enter_async_context(target.sequence(plan.target_options()))
                session = RoundSession(
                    completion,
                    local,
                    LocalTarget(verified, plan),
                    Fixed(plan.num_speculative_tokens),
                    plan.accept,
                    RequestEvents(plan.request_id, RequestObserver(), (tally.add_round, note_phases)),
                    SessionPolicy(asks_head=plan.asks_head),
                    count_one,
                )
                async for _ in session.rounds():
                    answer.add(time.perf_counter() - started, completion.token_ids[known:])
                    known = completion.length
                await local.finish()
            add(stats, tally.stats())
            return answer

        answers = await asyncio.gather(*map(one, requests_of(workload)))
        seconds = time.perf_counter() - started
        return Outcome(answers, seconds, stats.rounds, stats.drafted, stats.accepted, phases=phases)

    runner.run(start())
    set_start_aside()  # as the services do
    return lambda workload: runner.run(run(workload))


if __name__ == "__main__":
    serve(load)

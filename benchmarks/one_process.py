"""Tandem's own loop with both models in one process and no gRPC: the floor for what the split costs.

`tandem_coordinator.decoding.loop.generate` with the services' own proposer and verifier, called directly
instead of over gRPC.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.contenders import requests_of
from benchmarks.pace import Pace
from benchmarks.peers import PHASES, Answer, Outcome, Run, Workload, serve
from tandem.config.settings import load_settings
from tandem.model.types import GenerationRequest, Proposal, ProposeStep, SpeculationStats, Verification
from tandem.scopes import CallerScopes
from tandem.serving.server import set_start_aside
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.decoding.loop import generate
from tandem_coordinator.decoding.rounds import RequestRounds
from tandem_coordinator.decoding.tokenization import PromptEncoder
from tandem_coordinator.requests.plan import Models, Plan, make_plan
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.stats.speculation import add
from tandem_coordinator.transport.streams import RemoteSequence
from tandem_draft.proposers import DraftedSequence
from tandem_draft.proposers.standalone import load_standalone
from tandem_draft.settings import DraftSettings
from tandem_target.settings import TargetSettings
from tandem_target.verifier import VerifiedSequence, load_verifier


class Local:
    """Calls proposer and verifier as `DraftSequence` and `TargetSequence` ask the services: the first round only reads
    the prompt."""

    def __init__(
        self, drafted: DraftedSequence, verified: VerifiedSequence, plan: Plan, rounds: RequestRounds
    ) -> None:
        self._drafted, self._verified = drafted, verified
        self._plan, self._rounds = plan, rounds
        self._draft_knows, self._target_knows = RemoteSequence(), RemoteSequence()
        self._reading: asyncio.Task[Proposal] | None = None

    async def propose(self, completion: Completion) -> Proposal:
        count = min(self._plan.num_speculative_tokens, completion.room - 1)
        if count <= 0:
            return Proposal(completion.length)
        if self._reading is None:
            self._reading = asyncio.create_task(self._step(completion, 0))
            return Proposal(completion.length)
        await self._reading
        return await self._step(completion, count)

    async def finish(self) -> None:
        """Let the prompt be read to its end before the sequence goes."""
        if self._reading is not None:
            await self._reading

    async def _step(self, completion: Completion, count: int) -> Proposal:
        step = ProposeStep(self._draft_knows.delta_to(completion.token_ids), count)
        return await self._drafted.propose(step) or Proposal(completion.length)

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        self._rounds.proposed()
        delta = self._target_knows.delta_to(completion.token_ids, proposal.token_ids)
        verification = await self._verified.verify(self._plan.rule.step(delta, proposal, self._plan.row_kind))
        self._rounds.verified(0.0, len(proposal), verification, is_first=False)
        return verification


def load(setup: dict[str, Any]) -> Run:
    """Load both models into this process. Setup: see `benchmarks.contenders.Setup.as_json`."""
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    shared = {name: setup[name] for name in ("device", "dtype", "max_sequences", "max_length", "threads")}
    shared["enable_prefix_caching"] = False  # as in the services
    shared["engine"] = "tandem"  # vLLM runs one model in a process
    pace = Pace.from_text(setup["pace"]) if setup["pace"] else None
    on_steps = [None if pace is None else pace.paced(role) for role in ("target", "draft")]
    target = load_verifier(TargetSettings(**shared, model=Path(setup["target"])), on_steps[0])
    draft = load_standalone(DraftSettings(**shared, model=Path(setup["draft"])), on_steps[1])
    words = (
        "--target-address",
        "127.0.0.1:1",
        "--num-speculative-tokens",
        str(setup["num_speculative_tokens"]),
    )
    rule = ("--rejection-sampling-strategy", setup["rule"]) if setup["rule"] else ()
    settings = load_settings(CoordinatorSettings, (*words, *rule, *setup["options"]), "one-process")
    scopes = CallerScopes().of(address="this process")
    encoder = PromptEncoder(Tokenizer.from_file(str(Path(setup["target"]) / "tokenizer.json")))

    async def start() -> None:
        await target.start()
        await draft.start()

    async def run(workload: Workload) -> Outcome:
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        stats = SpeculationStats()
        served = Models(target.model_info, draft.model_info, encoder)
        started = time.perf_counter()

        async def one(request: GenerationRequest) -> Answer:
            plan = await make_plan(request, uuid.uuid4().hex, settings, served, scopes)
            completion, answer, proposed_before = plan.begin(), Answer(), False
            known = completion.length
            async with (
                draft.sequence(replace(plan.draft_options(), scope=scopes.prefix)) as drafted,
                target.sequence(plan.target_options()) as verified,
            ):
                rounds = RequestRounds()
                models = Local(drafted, verified, plan, rounds)
                accept = rounds.timed(partial(plan.accept, completion))
                chunks = generate(completion, models, models, accept)
                async for chunk, result in rounds.results(chunks):
                    # The first one waits until the draft has read the prompt
                    if chunk.proposed and proposed_before:
                        for phase, spent in result.times.phases.items():
                            phases[phase].append(spent)
                    proposed_before |= chunk.proposed > 0
                    answer.add(time.perf_counter() - started, completion.token_ids[known:])
                    known = completion.length
                await models.finish()
            add(stats, completion.stats)
            return answer

        answers = await asyncio.gather(*map(one, requests_of(workload)))
        seconds = time.perf_counter() - started
        return Outcome(answers, seconds, stats.rounds, stats.drafted, stats.accepted, phases=phases)

    runner.run(start())
    set_start_aside()  # as the services do
    return lambda workload: runner.run(run(workload))


if __name__ == "__main__":
    serve(load)

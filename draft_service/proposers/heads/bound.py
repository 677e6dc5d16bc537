"""A drafting head beside its target (EAGLE, Li et al. 2024, arXiv 2401.15077, and EAGLE-3): one proposer for all heads.

The head's sequence holds the target's tokens from the second on, since each of its pairs is a token and the target's
state one position earlier. A proposal starts behind the last token that the target has committed: the pairs before it
read the target's states, and those within the proposal the head's own, which are computed again from the target's once
it has read the tokens. Without the target's states there is no proposal, and nothing waits for them: the round goes on
without one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from draft_service.proposers.draft_head import extended
from draft_service.proposers.drafting import Drafting, Outcome
from draft_service.proposers.token_state import TokenState
from tandem.engine.backends.hidden_states.pairing import BoundSequences, PairedStates, Pairing
from tandem.engine.backends.interface import Sampler
from tandem.engine.backends.selection import Backends
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Continue, Failed, Job
from tandem.engine.kv_cache.arena import KvUsage
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.settings import EngineSettings
from tandem.errors import InvalidRequestError, ServiceUnavailableError
from tandem.telemetry.streams import OnStep
from tandem.types import Delta, DraftOptions, ModelInfo, Proposal, ProposeStep

logger = logging.getLogger(__name__)

SUPPORT_MASS, TOP_K = 0.97, 512
"""Defaults of a standalone draft as well (`draft_support_mass`, `draft_top_k`)."""


class _StatesLostError(ServiceUnavailableError):
    """The target gave its pages to another sequence while the head wanted to read them."""


@dataclass(frozen=True, slots=True)
class HeadKind:
    """How a head's passes become a proposal."""

    make_sequence: Callable[
        [Engine[Drafting, Proposal], CachedSequence, Pairing, BoundSequences, DraftOptions], BoundSequence
    ]
    extend: Extend
    """Head of the engine."""


class Extend(Protocol):
    """Head of the engine: from the logits of a pass to outcomes."""

    def __call__(
        self,
        ready: Sequence[Job[Drafting]],
        logits: Tensor,
        *,
        pairings: dict[CachedSequence, Pairing],
        sampler: Sampler,
    ) -> list[Outcome]:
        """The outcome of each job."""


class BoundProposer:
    """Drafts with a head that reads the states of one target."""

    def __init__(
        self,
        backends: Backends,
        states: PairedStates,
        sequences: BoundSequences,
        limits: EngineSettings,
        method: str,
        kind: HeadKind | None = None,
        on_step: OnStep = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            backends: Run the head, which is their model (`tandem.engine.backends.hidden_states.head_model.as_model`).
            states: What the head reads.
            sequences: The target's open sequences.
            limits: Of the head's engine. Other prompts' pages are not reused: a pair's keys depend on a token that
                its own sequence does not show.
            method: The drafting method.
            kind: How the head's passes become a proposal; by default one token for each pass.
            on_step: Called after each step of the head, for metrics.
            on_failure: Called when the engine's thread has ended by itself.
        """
        kind = self._kind = kind or HeadKind(BoundSequence, _extend)
        self._pairings = states.pairings
        self._sequences = sequences
        self._method = method
        self._engine: Engine[Drafting, Proposal] = Engine(
            backends.model,
            partial(kind.extend, pairings=states.pairings, sampler=backends.sampler),
            replace(limits, prefix_reuse=False),
            on_step,
            backends=backends,
            on_failure=on_failure,
        )

    @property
    def model_info(self) -> ModelInfo:
        """Information about the head."""
        info = self._engine.model.info
        return replace(info, max_length=self._engine.max_length, drafting_method=self._method)

    def kv_usage(self) -> KvUsage:
        """Usage of the head's own KV cache."""
        return self._engine.usage

    @property
    def overdue_seconds(self) -> float:
        """How long the engine has been stuck in a step; 0 while all is well."""
        return self._engine.overdue_seconds

    async def start(self) -> None:
        """Begin to work, and warm up."""
        self._engine.start()
        await self._engine.warm_up()

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()

    @asynccontextmanager
    async def sequence(self, options: DraftOptions) -> AsyncIterator[BoundSequence]:
        """Keep a sequence in the head's KV cache for as long as the context lives.

        Raises:
            CapacityError: there is no room for another.
            InvalidRequestError: it may become longer than the model can read.
        """
        length = options.max_length or self._engine.max_length
        cached = await self._engine.open(length)
        pairing = self._pairings[cached] = Pairing()
        try:
            yield self._kind.make_sequence(self._engine, cached, pairing, self._sequences, options)
        finally:
            del self._pairings[cached]
            self._engine.release(cached)


class BoundSequence:
    """One sequence that a head drafts for."""

    pushed = None
    """Nothing is drafted ahead: the head shares the target's device, and needs what its next verification computes."""

    def __init__(
        self,
        engine: Engine[Drafting, Proposal],
        cached: CachedSequence,
        pairing: Pairing,
        sequences: BoundSequences,
        options: DraftOptions,
    ) -> None:
        self._engine = engine
        self._cached = cached
        self._pairing = pairing
        self._sequences = sequences
        self._options = options
        self._tokens = TokenState(cached.max_length)
        self._read_length = 0
        """Pairs that the head has read and that no delta has changed since."""

    async def propose(self, step: ProposeStep) -> Proposal:
        """Apply the step's delta and draw the tokens that follow; none as long as the target has not read all tokens
        but the last.

        Raises:
            InvalidRequestError: the delta does not fit the sequence or the model, or the tokens do not.
            NonFiniteLogitsError: the model computed logits that are not finite.
        """
        self._apply(step.delta)
        length = len(self._tokens)
        if step.token_count > max(self._cached.max_length - length + 1, 0):
            raise InvalidRequestError(
                f"{step.token_count} tokens were asked for after {length}, but the sequence's limit is "
                f"{self._cached.max_length}"
            )
        target = self._sequences.find(self._options.request_id, self._tokens.token_ids[:-1])
        token_count = self._possible(step.token_count)
        if token_count == 0 or length < 2 or target is None:
            return Proposal(length)
        return await self._drafted(target, token_count)

    def _possible(self, token_count: int) -> int:
        """How many of the tokens that were asked for the head can propose."""
        return token_count

    def _apply(self, delta: Delta) -> None:
        kept = self._tokens.kept_length(delta)
        self._tokens.apply(delta, kept)
        self._read_length = min(self._read_length, max(kept - 1, 0))

    async def _drafted(self, target: CachedSequence, token_count: int) -> Proposal:
        length, options = len(self._tokens), self._options
        self._pairing.begin(target, length - 1)
        drafting = Drafting(length, token_count, options, options.draft_top_k or TOP_K, SUPPORT_MASS)
        job = self._job(drafting)
        self._read_length = 0  # an error leaves nothing that can be trusted
        try:
            proposal = replace(await self._engine.run(job), cost=job.cost)
        except _StatesLostError:
            return Proposal(length)
        self._read_length = length - 1
        return proposal

    def _job(self, drafting: Drafting) -> Job[Drafting]:
        delta = Delta(self._read_length, tuple(self._tokens.token_ids[self._read_length + 1 :]))
        return Job(self._cached, delta, 1, drafting)


def _extend(
    ready: Sequence[Job[Drafting]],
    logits: Tensor,
    *,
    pairings: dict[CachedSequence, Pairing],
    sampler: Sampler,
) -> list[Outcome]:
    """Head of the engine: one more token for each proposal; a finished one leaves the pairs of the target's states."""
    outcomes = extended([job.payload for job in ready], logits, sampler)
    return [
        finished(job, outcome, pairings.get(job.sequence))
        for job, outcome in zip(ready, outcomes, strict=True)
    ]


def finished(job: Job[Drafting], outcome: Outcome, pairing: Pairing | None) -> Outcome:
    """The outcome of a pass, after which a finished proposal leaves only what the target's states gave."""
    if pairing is None:
        return outcome  # released meanwhile
    if pairing.is_lost:
        return Failed(_StatesLostError("the target's hidden states are gone"))
    if not isinstance(outcome, Continue | Failed):
        job.sequence.apply(Delta(pairing.known_length, ()))
    return outcome

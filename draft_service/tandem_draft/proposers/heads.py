"""A drafting head beside its target (EAGLE, Li et al. 2024, arXiv 2401.15077, and EAGLE-3): one proposer for all heads.

The head's sequence holds the target's tokens from the second on, since each of its pairs is a token and the target's
state one position earlier. A proposal starts behind the last token that the target has committed: the pairs before it
read the target's states, and those within the proposal the head's own, which are computed again from the target's once
it has read the tokens. Without the target's states there is no proposal, and nothing waits for them: the round goes on
without one. Where the text repeats itself, the head may be spared (`tandem_draft.proposers.repeats`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field, replace
from functools import cache
from itertools import accumulate

from torch import Tensor

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Continue, Failed, Job
from tandem.engine.hidden_states import Pairing
from tandem.engine.interface import EngineOwner
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.heads.interface import BlockHead, DraftHead
from tandem.engine.rows import Sampler
from tandem.errors import ServiceUnavailableError
from tandem.model.grammar import GrammarState
from tandem.model.types import (
    Delta,
    DraftOptions,
    Grammar,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    StepCost,
)
from tandem_draft.proposers.drafting import Drafting, Outcome, check_room, extended, with_defaults
from tandem_draft.proposers.model_free import TokenState
from tandem_draft.proposers.repeats import Odds, Repeats

logger = logging.getLogger(__name__)

SUPPORT_MASS, TOP_K = 0.97, 512
"""Defaults of a standalone draft as well (`draft_support_mass`, `draft_top_k`)."""


class _StatesLostError(ServiceUnavailableError):
    """The target gave its pages to another sequence while the head wanted to read them."""


@dataclass(eq=False)
class BoundProposer(EngineOwner[Engine[Drafting, Proposal]]):
    """Drafts with a head that reads the states of one target."""

    head: DraftHead
    pairings: dict[CachedSequence, Pairing]
    targets: Mapping[str, CachedSequence]
    """The target's open sequences, by request."""
    method: str
    repeats: InitVar[bool] = False
    open_grammar: Callable[[Grammar, str], Awaitable[GrammarState]] | None = None
    """Compiles what sequences of a scope may be, as the target does; None: proposals heed no grammar."""
    vocabularies: None = field(default=None, init=False)
    """It reads the target's own tokens."""

    def __post_init__(self, repeats: bool) -> None:
        self._odds = {is_greedy: Odds() for is_greedy in (True, False)} if repeats else {}

    @property
    def model_info(self) -> ModelInfo:
        return replace(self._engine.info, drafting_method=self.method)

    @asynccontextmanager
    async def sequence(self, options: DraftOptions) -> AsyncIterator[BoundSequence]:
        grammar = None
        if options.grammar is not None and self.open_grammar is not None:
            grammar = await self.open_grammar(options.grammar, options.scope)
        options = with_defaults(options, TOP_K, SUPPORT_MASS)
        length = options.max_length or self._engine.max_length
        cached = await self._engine.open(length)
        pairing = self.pairings[cached] = Pairing()
        by_tokens = options.row_kind is RowKind.TOKEN and not options.with_token_logits
        # Penalties are there to prevent repetition.
        may_repeat = by_tokens and not options.sampling.penalizes
        odds = self._odds.get(options.sampling.is_greedy) if may_repeat else None
        try:
            make = BlockSequence if isinstance(self.head, BlockHead) else BoundSequence
            yield make(self._engine, self.head, cached, pairing, self.targets, options, grammar, odds)
        finally:
            del self.pairings[cached]
            self._engine.release(cached)


@dataclass(eq=False)
class BoundSequence:
    """One sequence that a head drafts for."""

    engine: Engine[Drafting, Proposal]
    head: DraftHead
    cached: CachedSequence
    pairing: Pairing
    targets: Mapping[str, CachedSequence]
    options: DraftOptions
    grammar: GrammarState | None
    odds: InitVar[Odds | None]
    pushed: None = field(default=None, init=False)
    """Nothing is drafted ahead: the head shares the target's device, and needs what its next verification computes."""
    _read_length: int = field(default=0, init=False)
    """Pairs that the head has read and that no delta has changed since."""

    def __post_init__(self, odds: Odds | None) -> None:
        self._tokens = TokenState(self.cached.max_length)
        self._repeats = None if odds is None else Repeats(self._tokens, odds)

    async def propose(self, step: ProposeStep) -> Proposal:
        """Apply the step's delta and draw the tokens that follow; none as long as the target has not read all tokens
        but the last."""
        began = time.perf_counter()
        kept = self._tokens.kept_length(step.delta)
        if self._repeats is not None and kept < len(self._tokens):
            self._repeats.forget(kept)
        self._tokens.apply(step.delta, kept)
        self._read_length = min(self._read_length, self._pairs_of(kept))
        length = len(self._tokens)
        check_room(self.cached, length, step.token_count)
        if self._repeats is not None and (repeated := await self._repeats.propose(step.token_count)):
            return Proposal(length, repeated, cost=StepCost(time.perf_counter() - began, 1, 1))
        target = self._target(self._tokens.token_ids[:-1].tolist())
        token_count = self._possible(step.token_count)
        if token_count == 0 or length < 2 or target is None:
            return Proposal(length)
        proposal = await self._drafted(target, token_count)
        if self._repeats is not None:
            self._repeats.proposed(proposal.token_ids)
        return proposal

    def _target(self, token_ids: list[int]) -> CachedSequence | None:
        """The request's sequence on the target, if it has read exactly these tokens, whatever it read after them."""
        target = self.targets.get(self.options.request_id)
        if target is None or target.computed_length < len(token_ids):
            return None
        return target if target.token_ids[: len(token_ids)] == token_ids else None

    def _possible(self, token_count: int) -> int:
        """As many as one pass foresees, where that is more than one: there is no second pass then."""
        most = self.head.tokens_per_pass
        if not 1 < most < token_count:
            return token_count
        _report_shorter(token_count, most)
        return most

    def _pairs_of(self, length: int) -> int:
        return max(length - 1, 0)

    async def _drafted(self, target: CachedSequence, token_count: int) -> Proposal:
        length, options = len(self._tokens), self.options
        self.pairing.begin(target, length - 1)
        drafting = Drafting(length, token_count, options, self.grammar)
        if self.grammar is not None:
            drafting.before = self._tokens.token_ids[options.prompt_length :].tolist()
        if options.sampling.penalizes:
            drafting.context = self._tokens.token_ids.tolist()
        job = self._job(drafting)
        self._read_length = 0  # an error leaves nothing that can be trusted
        try:
            proposal = replace(await self.engine.submit(job), cost=job.cost)
        except _StatesLostError:
            return Proposal(length)
        self._read_length = length - 1
        return proposal

    def _job(self, drafting: Drafting) -> Job[Drafting]:
        delta = Delta(self._read_length, tuple(self._tokens.token_ids[self._read_length + 1 :]))
        return Job(self.cached, delta, 1, drafting)


def extend_by_passes(
    ready: Sequence[Job[Drafting]],
    logits: Tensor,
    *,
    head: DraftHead,
    pairings: dict[CachedSequence, Pairing],
    sampler: Sampler,
) -> list[Outcome]:
    """Head of the engine: for each proposal as many tokens as a pass foresees."""
    passes = head.tokens_per_pass
    logits = logits.view(len(logits) * passes, -1)
    if isinstance(head, BlockHead):
        # A block's first row is that of the text's last token
        ends = accumulate(job.row_count for job in ready)
        rows = [range(end - job.row_count + 1, end) for job, end in zip(ready, ends, strict=True)]
    else:
        rows = [range(i * passes, (i + 1) * passes) for i in range(len(ready))]
    outcomes: list[Outcome] = [Continue(-1)] * len(ready)
    for number in range(max(map(len, rows))):
        unfinished = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Continue)]
        if not unfinished:
            break
        at = [rows[i][number] for i in unfinished]
        own = logits if len(at) == len(logits) else logits[at]
        drawn = extended([ready[i].payload for i in unfinished], own, sampler)
        for i, outcome in zip(unfinished, drawn, strict=True):
            outcomes[i] = outcome
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


class BlockSequence(BoundSequence):
    """One sequence that a head drafts blocks for."""

    head: BlockHead

    def _pairs_of(self, length: int) -> int:
        return length

    def _possible(self, token_count: int) -> int:
        return min(token_count, self.head.block_size - 1, self.cached.max_length - len(self._tokens))

    def _job(self, drafting: Drafting) -> Job[Drafting]:
        masks = (self.head.mask_token_id,) * drafting.token_count
        delta = Delta(self._read_length, (*self._tokens.token_ids[self._read_length :], *masks))
        # A row for each token of the block: the engine computes rows in one step, so it never divides the block.
        return Job(self.cached, delta, drafting.token_count + 1, drafting)


@cache
def _report_shorter(token_count: int, tokens_per_pass: int) -> None:
    logger.warning(
        "%d tokens were asked for, but the draft has %d heads, which propose one token each; proposals have at "
        "most as many: set num_speculative_tokens to %d",
        token_count,
        tokens_per_pass,
        tokens_per_pass,
    )

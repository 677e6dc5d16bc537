"""A target's own drafting head (EAGLE, Li et al. 2024, arXiv 2401.15077, and others): one drafter for all heads.

It proposes on the thread of the target's engine, at the beginning of the step that verifies the proposal. The head's
sequence holds the target's tokens from the second on, since each of its pairs is a token and the target's state one
position earlier. A proposal starts behind the last committed token: the pairs before it read the target's states, and
those within the proposal the head's own, which are computed again from the target's once it has read the tokens. Where
the text repeats itself, the head may be spared (`tandem.drafting.repeats`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from torch import Tensor

from tandem.acceptance.strategies import GREEDY, STRICT
from tandem.drafting.proposal import Conclusion, Drafting, extend_drafts
from tandem.drafting.repeats import Odds, Repeats
from tandem.drafting.tokens import TokenState
from tandem.engine.core.inline import InlineEngine
from tandem.engine.core.jobs import Continue, Failed, Job
from tandem.engine.hidden_states import Pairing
from tandem.engine.interface import KvUsage, RowRequest
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.heads.interface import BlockHead, DraftHead
from tandem.engine.rows import Sampler
from tandem.errors import ServiceUnavailableError
from tandem.model.types import Delta, DraftOptions, Proposal, StepCost, StepProfile

logger = logging.getLogger(__name__)

SUPPORT_MASS = 0.97
TOP_K = 512
"""Defaults of a standalone draft as well (`draft_support_mass`, `draft_top_k`)."""
_MAX_FAILURES = 8
"""Failures in a row after which the head is given up: as many failed steps stop an engine."""


class _StatesLostError(ServiceUnavailableError):
    """The target gave its pages to another sequence while the head wanted to read them."""


@dataclass(slots=True, eq=False)
class _Drafted:
    """The head's side of one of the target's sequences."""

    cached: CachedSequence
    pairing: Pairing
    options: DraftOptions
    tokens: TokenState
    repeats: Repeats | None
    read_length: int = 0
    """Pairs that the head has read and that nothing has changed since."""
    kept_length: int = 0
    """First tokens of `tokens` that nothing has changed since."""


class HeadDrafter:
    """Drafts with a head that reads the states of the target whose engine calls it. See `Drafter` for the methods."""

    def __init__(
        self,
        engine: InlineEngine[Drafting, Proposal],
        head: DraftHead,
        pairings: dict[CachedSequence, Pairing],
        *,
        repeats: bool,
    ) -> None:
        self._engine = engine
        self._head = head
        self.pairings = pairings
        self._odds = {is_greedy: Odds() for is_greedy in (True, False)} if repeats else {}
        self.drafted: dict[CachedSequence, _Drafted] = {}
        """By the target's sequence."""
        self._failures = 0
        """Calls of `propose` that have failed since the head's last proposal."""

    async def start(self) -> None:
        self._engine.start()
        await self._engine.warm_up()

    async def close(self) -> None:
        await self._engine.close()

    @property
    def step_profile(self) -> StepProfile:
        return self._engine.info.step_profile

    @property
    def usage(self) -> KvUsage:
        return self._engine.usage

    @property
    def overdue_seconds(self) -> float:
        return self._engine.overdue_seconds

    def begin(self, job: Job[RowRequest]) -> None:
        own = self.drafted.get(job.sequence)
        if own is not None:
            length = job.delta.base_length
            own.read_length = min(own.read_length, self._pairs_of(length))
            own.kept_length = min(own.kept_length, length)

    def begin_step(self) -> None:
        """The head reads the target's states when it is asked."""

    def release(self, sequence: CachedSequence) -> None:
        own = self.drafted.pop(sequence, None)
        if own is not None:
            del self.pairings[own.cached]
            self._engine.forget(own.cached)

    def propose(self, jobs: Sequence[Job[RowRequest]]) -> list[Proposal]:
        """A proposal for each job: what the text said before, or what the head says; an empty one where it fails."""
        if self._failures < _MAX_FAILURES:
            try:
                return self._propose(jobs)
            except Exception:
                self._failures += 1
                fields = {"sequences": len(jobs), "is_given_up": self._failures == _MAX_FAILURES}
                logger.exception("head failed", extra=fields)
        return _propose_nothing(jobs)

    def _propose(self, jobs: Sequence[Job[RowRequest]]) -> list[Proposal]:
        began = time.perf_counter()
        proposals = _propose_nothing(jobs)
        asked: list[int] = []
        drafts: list[Job[Drafting]] = []
        for index, job in enumerate(jobs):
            count = self._count(job)
            if count <= 0:
                continue
            own = self._own(job)
            if own.repeats is not None and (repeated := own.repeats.propose(count)):
                cost = StepCost(time.perf_counter() - began, len(jobs), len(jobs))
                proposals[index] = Proposal(job.sequence.length + 1, repeated, cost=cost)
                continue
            asked.append(index)
            drafts.append(self._draft(own, job, count))
        if drafts:
            for index, draft, found in zip(asked, drafts, self._engine.run_here(drafts), strict=True):
                proposals[index] = self._take(jobs[index], draft, found)
        return proposals

    def _count(self, job: Job[RowRequest]) -> int:
        """Number of tokens to propose: as many as one pass foresees, where that is more than one: there is no second
        pass then."""
        length = job.sequence.length + 1
        if length < 2:
            return 0  # there is no state of the target's before the first token
        wanted = job.payload.step.own_tokens or 0
        count = min(wanted, job.payload.options.max_length - length - 1)
        head = self._head
        if isinstance(head, BlockHead):
            return min(count, head.block_size - 1)
        if 1 < head.tokens_per_pass < wanted:
            _report_shorter(wanted, head.tokens_per_pass)
            return min(count, head.tokens_per_pass)
        return count

    def _own(self, job: Job[RowRequest]) -> _Drafted:
        """The head's side of a job's sequence, with all of its tokens."""
        sequence = job.sequence
        own = self.drafted.get(sequence)
        if own is None:
            own = self.drafted[sequence] = self._new(job)
        kept = own.kept_length
        if own.repeats is not None and kept < len(own.tokens):
            own.repeats.forget(kept)
        assert job.withheld is not None
        own.tokens.apply(Delta(kept, (*sequence.token_ids[kept:], job.withheld)), kept)
        own.kept_length = len(own.tokens)
        return own

    def _new(self, job: Job[RowRequest]) -> _Drafted:
        options = job.payload.options
        rule = job.payload.rule
        assert rule is not None
        strategy = rule.strategy
        drafting = DraftOptions(
            options.request_id,
            options.sampling,
            options.max_length,
            prompt_length=options.prompt_length,
            row_kind=strategy.draft_row_kind,
            draft_top_k=options.draft_top_k or TOP_K,
            with_token_logits=strategy.needs_token_logits,
            draft_support_mass=SUPPORT_MASS,
        )
        # Under other rules a text depends on its proposals, and they must not depend on other sequences.
        # Penalties are there to prevent repetition.
        may_repeat = strategy in (GREEDY, STRICT) and not options.sampling.penalizes
        odds = self._odds.get(options.sampling.is_greedy) if may_repeat else None
        tokens = TokenState(options.max_length)
        cached = self._engine.place(options.max_length)
        pairing = self.pairings[cached] = Pairing()
        repeats = None if odds is None else Repeats(tokens, odds)
        return _Drafted(cached, pairing, drafting, tokens, repeats)

    def _pairs_of(self, length: int) -> int:
        """Pairs that only the first `length` tokens decide."""
        return length if isinstance(self._head, BlockHead) else max(length - 1, 0)

    def _draft(self, own: _Drafted, job: Job[RowRequest], count: int) -> Job[Drafting]:
        """The head's job for a proposal of so many tokens."""
        length = len(own.tokens)
        options = own.options
        own.pairing.begin(job.sequence, length - 1)
        drafting = Drafting(length, count, options, job.payload.grammar)
        if drafting.grammar is not None:
            drafting.before = own.tokens.token_ids[options.prompt_length :].tolist()
        if options.sampling.penalizes:
            drafting.context = own.tokens.token_ids.tolist()
        read = own.read_length
        own.read_length = 0  # an error leaves nothing that can be trusted
        if isinstance(self._head, BlockHead):
            masks = (self._head.mask_token_id,) * count
            delta = Delta(read, (*own.tokens.token_ids[read:], *masks))
            # A row for each token of the block: the engine computes rows in one step, so it never divides the block.
            return Job(own.cached, delta, count + 1, drafting)
        return Job(own.cached, Delta(read, tuple(own.tokens.token_ids[read + 1 :])), 1, drafting)

    def _take(self, job: Job[RowRequest], draft: Job[Drafting], found: Proposal | BaseException) -> Proposal:
        own = self.drafted[job.sequence]
        if not isinstance(found, Proposal):
            if not isinstance(found, _StatesLostError):
                fields = {"request_id": own.options.request_id, "reason": str(found)}
                logger.warning("head proposes nothing", extra=fields)
            return Proposal(len(own.tokens))
        self._failures = 0
        own.read_length = len(own.tokens) - 1
        if own.repeats is not None:
            own.repeats.note(found.token_ids)
        return replace(found, cost=draft.cost)


def _propose_nothing(jobs: Sequence[Job[RowRequest]]) -> list[Proposal]:
    return [Proposal(job.sequence.length + 1) for job in jobs]


def extend_by_passes(
    ready: Sequence[Job[Drafting]],
    logits: Tensor,
    *,
    head: DraftHead,
    pairings: dict[CachedSequence, Pairing],
    sampler: Sampler,
) -> list[Conclusion]:
    """Head of the engine: for each proposal as many tokens as a pass foresees."""
    passes = head.tokens_per_pass
    logits = logits.view(len(logits) * passes, -1)
    if isinstance(head, BlockHead):
        # A block's first row is that of the text's last token
        ends = accumulate(job.row_count for job in ready)
        rows = [range(end - job.row_count + 1, end) for job, end in zip(ready, ends, strict=True)]
    else:
        rows = [range(i * passes, (i + 1) * passes) for i in range(len(ready))]
    outcomes: list[Conclusion] = [Continue(-1)] * len(ready)
    for number in range(max(map(len, rows))):
        unfinished = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Continue)]
        if not unfinished:
            break
        at = [rows[i][number] for i in unfinished]
        own = logits if len(at) == len(logits) else logits[at]
        drawn = extend_drafts([ready[i].payload for i in unfinished], own, sampler)
        for i, outcome in zip(unfinished, drawn, strict=True):
            outcomes[i] = outcome
    return [
        conclude(job, outcome, pairings.get(job.sequence))
        for job, outcome in zip(ready, outcomes, strict=True)
    ]


def conclude(job: Job[Drafting], outcome: Conclusion, pairing: Pairing | None) -> Conclusion:
    """The outcome of a pass, after which a finished proposal leaves only what the target's states gave."""
    if pairing is None:
        return outcome  # released meanwhile
    if pairing.is_lost:
        return Failed(_StatesLostError("the target's hidden states are gone"))
    if not isinstance(outcome, Continue | Failed):
        job.sequence.apply(Delta(pairing.known_length, ()))
    return outcome


@cache
def _report_shorter(token_count: int, tokens_per_pass: int) -> None:
    logger.warning(
        "%d tokens were asked for, but the draft has %d heads, which propose one token each; proposals have at "
        "most as many: set num_speculative_tokens to %d",
        token_count,
        tokens_per_pass,
        tokens_per_pass,
    )

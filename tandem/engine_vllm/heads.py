"""vLLM's own drafting heads behind the seam of a target that drafts by itself (`tandem.engine.core.jobs.Drafter`).

vLLM's proposer reads what a step of the target has left in its worker, so it runs once between two steps, for all
sequences of the first: it reads the hidden states of their tokens, and drafts behind what their rounds came to. By then
the answers have left. A head's pair is a token and the target's state one position earlier (EAGLE, Li et al. 2024,
arXiv 2401.15077), so the last token of a step has its pair only where the next token is known; where it is not yet, the
target computes that position once more with the sequence's next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from tandem.acceptance.strategies import STRICT
from tandem.engine.core.jobs import Job
from tandem.engine.interface import RowRequest
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine_vllm.step import RoundEnd, SharedNoise
from tandem.model.types import Proposal, StepCost, StepProfile, common_length

logger = logging.getLogger(__name__)

_MAX_FAILURES = 8
"""Failures in a row after which the head is given up: as many failed steps stop an engine."""
_PROFILED_SEQUENCES = (1, 4, 16)
"""Sequences of the head's steps that are timed at the start."""


class HeadModel(Protocol):
    """The workers' side of a head."""

    def propose(self, ends: SequenceOf[RoundEnd], count: int) -> list[list[int]]:
        """The head's tokens behind each part of the last step, in its order, at most `count` for each."""

    def time_heads(self, sequences: int) -> float:
        """Seconds that the head takes for one token of so many sequences."""


@dataclass(frozen=True, slots=True)
class _LastPart:
    """A sequence's part of the step that the head has not read yet."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    """From `start` on."""
    draft_count: int
    """How many of the last ones were a proposal."""

    @property
    def certain_count(self) -> int:
        return len(self.token_ids) - self.draft_count


@dataclass(slots=True)
class _Read:
    """The pairs of one sequence that the head has read, and its proposal behind them."""

    pairs: list[int] = field(default_factory=list)
    """The token of each of its pairs: that of position 0 is the sequence's second token."""
    kept: int = 0
    """First pairs that nothing has changed since."""
    is_asked: bool = False
    """True if the step that was asked for last wants a proposal; otherwise the head may rest."""
    proposal: tuple[int, ...] = ()
    length: int = -1
    """Length of the sequence that it extends."""

    def count_valid(self, token_ids: SequenceOf[int]) -> int:
        """How many of the pairs, from the first on, are those of these tokens."""
        valid = self.kept
        while valid < len(self.pairs) and valid + 1 < len(token_ids):
            if self.pairs[valid] != token_ids[valid + 1]:
                break
            valid += 1
        self.kept = valid
        return valid


class VllmHeads:
    """Drafts by a head that vLLM runs beside its target. See `Drafter` for `propose`, `begin` and `release`.

    A sequence that never asks for a proposal has no pairs, and its blocks none: they are known apart from the others.
    """

    overdue_seconds = 0.0
    """The workers' steps are watched where they are called."""

    def __init__(self, model: HeadModel, most: int, *, has_pairs: bool) -> None:
        """
        Args:
            most: Tokens of the longest proposal, for which vLLM has prepared.
            has_pairs: True if the head keeps keys and values of what it has read.
        """
        self._model = model
        self._most = most
        self._has_pairs = has_pairs
        self._read: dict[Sequence, _Read] = {}
        self._unread: list[_LastPart] = []
        """Parts of the last step, until the head has read them."""
        self._lost: set[Sequence] = set()
        """Sequences that have lost their blocks since."""
        self._failures = 0
        self.step_profile = StepProfile()

    async def start(self) -> None:
        """Time the head's steps. No step of the target runs yet."""
        seconds = {(count, 1): self._model.time_heads(count) for count in _PROFILED_SEQUENCES}
        self.step_profile = StepProfile(seconds)

    async def close(self) -> None:
        """The workers end with their engine."""

    # ---- the target's steps

    def begin_step(self) -> None:
        """Have the head read what the last step has left, before another one takes its place."""
        self._read_last((), 0)

    def end_step(self, segments: SequenceOf[Segment], row_counts: SequenceOf[int]) -> None:
        """Take note of a step that has run; its tokens do not count as computed yet."""
        if self._failures >= _MAX_FAILURES:
            return
        self._lost.clear()
        self._unread = [
            _LastPart(segment.sequence, segment.start, segment.token_ids, max(rows - 1, 0))
            for segment, rows in zip(segments, row_counts, strict=True)
        ]

    def has_pairs(self, sequence: Sequence) -> bool:
        """True if the sequence's blocks have the head's pairs, as far as it has read."""
        return self._has_pairs and sequence in self._read

    def read_length(self, sequence: Sequence) -> int | None:
        """How many of the sequence's first positions the head has read; None where that does not matter."""
        if not self.has_pairs(sequence) or self._failures >= _MAX_FAILURES:
            return None
        return self._read[sequence].count_valid(sequence.token_ids)

    def wanted_length(self, sequence: Sequence) -> int | None:
        """The same; None where the head rests, too."""
        own = self._read.get(sequence)
        return self.read_length(sequence) if own is not None and own.is_asked else None

    def adopt(self, sequence: Sequence, length: int) -> None:
        """Take over the pairs of a prefix that another sequence has left in the cache, so many tokens."""
        own = self._read[sequence]
        own.pairs = sequence.token_ids[1 : length + 1]
        own.kept = len(own.pairs)

    def lose(self, sequence: Sequence) -> None:
        """The sequence has lost its blocks, and the head its pairs."""
        own = self._read.get(sequence)
        if own is not None:
            own.pairs.clear()
            own.kept = 0
            self._lost.add(sequence)

    # ---- proposals

    def propose(self, jobs: SequenceOf[Job[RowRequest]]) -> list[Proposal]:
        """A proposal for each job; an empty one where the head has not read all of its sequence, or has failed."""
        began = time.perf_counter()
        wanted = min(max(job.payload.step.own_tokens or 0 for job in jobs), self._most)
        parts = len(self._unread)
        self._read_last(jobs, wanted)
        seconds = time.perf_counter() - began
        cost = StepCost(seconds, parts, parts * wanted) if parts else None
        return [self._take(job, cost) for job in jobs]

    def begin(self, job: Job[RowRequest]) -> None:
        # A warm-up has no payload
        request: RowRequest | None = job.payload
        is_asked = request is not None and bool(request.step.own_tokens)
        own = self._read.get(job.sequence)
        if own is None:
            if not is_asked:
                return
            own = self._read[job.sequence] = _Read()
        own.is_asked = is_asked
        own.kept = min(own.kept, max(job.delta.base_length - 1, 0))

    def release(self, sequence: Sequence) -> None:
        self._read.pop(sequence, None)
        self._lost.discard(sequence)

    def _take(self, job: Job[RowRequest], cost: StepCost | None) -> Proposal:
        length = job.sequence.length + 1
        own = self._read.get(job.sequence)
        request = job.payload
        count = min(request.step.own_tokens or 0, request.options.max_length - length - 1)
        needs_logits = request.rule is not None and request.rule.strategy.needs_token_logits
        if own is None or own.length != length or count <= 0 or needs_logits:
            return Proposal(length)
        return Proposal(length, self._allowed(job, own.proposal[:count]), cost=cost)

    def _allowed(self, job: Job[RowRequest], token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The first tokens that hold to the request's grammar."""
        grammar = job.payload.grammar
        if grammar is None:
            return token_ids
        completion = [*job.sequence.token_ids[job.payload.options.prompt_length :], job.withheld or 0]
        if not grammar.follow(completion):
            return ()
        return token_ids[: grammar.allowed_count(token_ids)]

    def _read_last(self, jobs: SequenceOf[Job[RowRequest]], count: int) -> None:
        """Have the head read the last step, and draft so many tokens behind it for these jobs."""
        parts = self._unread
        self._unread = []
        if not any(self._is_asked(part.sequence) for part in parts):
            return
        wanted = {job.sequence: job for job in jobs}
        ends = [self._end_of(part, wanted.get(part.sequence)) for part in parts]
        try:
            drafted = self._model.propose(ends, count)
        except Exception:
            self._failures += 1
            fields = {"sequences": len(parts), "is_given_up": self._failures == _MAX_FAILURES}
            logger.exception("head failed", extra=fields)
            self._read.clear()
            return
        self._failures = 0
        for part, end, token_ids in zip(parts, ends, drafted, strict=True):
            own = self._read.get(part.sequence)
            if own is not None and end.next_token_id is not None:
                own.proposal = tuple(token_ids)
                own.length = part.start + part.certain_count + end.accepted_count + 1

    def _is_asked(self, sequence: Sequence) -> bool:
        own = self._read.get(sequence)
        return own is not None and own.is_asked

    def _end_of(self, part: _LastPart, job: Job[RowRequest] | None) -> RoundEnd:
        """The end of a part's round, by the sequence's tokens now, and by the one that its job withholds; its pairs
        are noted."""
        sequence = part.sequence
        own = self._read.get(sequence)
        if own is None or sequence in self._lost or sequence.is_released:
            return RoundEnd(0, None)
        text = sequence.token_ids[part.start :]
        if job is not None and job.withheld is not None:
            text.append(job.withheld)
        same = common_length(part.token_ids, text)
        own.length = -1
        if self._has_pairs and own.count_valid(sequence.token_ids) < part.start:
            # It has rested, and missed what lies before: that is read first, see `wanted_length`.
            return RoundEnd(max(same - part.certain_count, 0), None)
        own.pairs[part.start :] = text[1 : same + 1]
        own.kept = min(own.kept, part.start)
        if same < part.certain_count or same == len(text):
            # Another token stands where its last certain one was, or nobody knows yet what follows.
            del own.pairs[part.start + max(same - 1, 0) :]
            return RoundEnd(max(same - part.certain_count, 0), None)
        length = part.start + same + 1
        return RoundEnd(same - part.certain_count, text[same], None if job is None else noise_of(job, length))


def noise_of(job: Job[RowRequest], length: int) -> SharedNoise | None:
    """Where the rule accepts just what the target draws, the head draws with the target's noise. Under the others its
    proposals are certain: the most probable tokens."""
    request = job.payload
    sampling = request.options.sampling
    if request.rule is None or request.rule.strategy is not STRICT or sampling.is_greedy:
        return None
    return SharedNoise(sampling.temperature, sampling.seed, length)

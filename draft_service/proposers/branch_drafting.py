"""Drafting ahead of a verification: continuations of its likely outcomes, a depth at a time.

The coordinator keeps what is pushed. When the verification ends in one of the outcomes, the next proposal is there
already. Each continuation is what the draft would propose if it were asked after that outcome: it is drawn with the
same noise, keyed by the same positions and the same base length. Speculative speculative decoding
(github.com/tanishqkumar/ssd) drafts ahead on one node, with independent noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draft_service.proposers.draft_head import extended
from draft_service.proposers.drafting import Drafting
from draft_service.proposers.outcome_choice import OutcomeHistory, Ranking
from tandem.engine.backends.branches import BranchStep
from tandem.engine.backends.interface import Sampler
from tandem.engine.core.background.kept_branches import Lead
from tandem.engine.core.events import StepRecord
from tandem.engine.core.jobs import Failed
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.errors import TandemError
from tandem.sampling.noise import gumbel, recovery_keys, target_keys
from tandem.types import (
    AheadBudget,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    RowKind,
    SparseDistribution,
    StepCost,
)

MAX_ROUND_BYTES = 40_000
"""Maximum size of all messages of a round. Beyond it the last branches are dropped."""
_MAX_CANDIDATES = 16
"""Tokens that may follow one number of accepted tokens."""
_BYTES_PER_ID = 8
"""In a support: an id and its probability."""
_BYTES_PER_TOKEN = 6
"""In a message, at most, beside its support: the token, the support's size."""


@dataclass(slots=True)
class BranchDrafting:
    """The branches of one round of one sequence; a background job of the draft's engine."""

    sequence: CachedSequence
    delta: Delta
    proposed: tuple[int, ...]
    """The proposal that is being verified: the last tokens of the sequence."""
    budget: AheadBudget
    options: DraftOptions
    draft_top_k: int
    support_mass: float
    sampler: Sampler
    history: OutcomeHistory
    max_length: int
    """Positions that the model has."""
    push: Callable[[DraftedOutcomes | TandemError], None]
    """Called on the engine's thread."""
    ranking: Ranking | None = None
    """Set once the trunk was read; for the history, which learns the outcome of the round on the event loop."""
    _outcomes: list[tuple[int, int]] = field(default_factory=list)
    _branches: list[Drafting] = field(default_factory=list)
    _token_count: int = 0
    """Tokens of each continuation."""
    _lead_count: int = 0
    """Tokens behind the trunk, in the cache, that the first outcome begins with."""
    _depth: int = 0
    _max_depth: int = 0
    """Steps of branches: one for each token, and one that reads the last: otherwise a branch that comes true has to be
    read before its own outcomes are ranked."""
    _bytes: int = 0
    _ready: DraftedOutcomes | None = None
    """The outcomes of the step in progress."""

    @property
    def base_length(self) -> int:
        """Length of the sequence that the proposal extends."""
        return self.delta.length - len(self.proposed)

    @property
    def row_count(self) -> int:
        """See `BackgroundJob`."""
        return len(self.proposed) + 1

    @property
    def max_lead(self) -> int:
        """See `BackgroundJob`. Tokens that are drawn with noise of their position alone do not depend on the round."""
        if self.options.row_kind is not RowKind.TOKEN:
            return 0
        tokens = self.budget.token_count
        return max(min(tokens, self.max_length - self.delta.length - tokens - 1), 0)

    def begin(self, logits: Tensor, room: int, lead: Lead | None) -> BranchStep | None:
        """See `BackgroundJob`."""
        ranking = rank(logits, self.proposed, self.base_length, self.options, self.sampler)
        if ranking is None:
            return None
        self.ranking = ranking
        # A model with learned positions has none behind its last.
        tokens = min(self.budget.token_count, room, self.max_length - self.delta.length)
        if tokens <= 0:
            return None
        count = min(self.budget.branch_count, room // tokens)
        led = 0 if lead is None else len(lead.token_ids)
        reads_last = count * (tokens + 1) <= room and self.delta.length + led + tokens < self.max_length
        self._token_count, self._max_depth = tokens, tokens + reads_last
        self._outcomes = self.history.likeliest(self.proposed, ranking, count)
        self._branches = [
            Drafting(
                self.base_length + accepted + 1, tokens, self.options, self.draft_top_k, self.support_mass
            )
            for accepted, _ in self._outcomes
        ]
        inputs = [token_id for _, token_id in self._outcomes]
        if lead is not None and self._outcomes[:1] == [(len(self.proposed), lead.token_ids[0])]:
            token_id = self._led(lead)
            if token_id is None:
                return None
            inputs[0] = token_id
        return self._step(inputs)

    def _led(self, lead: Lead) -> int | None:
        """Let the first branch go on behind the lead; its next token, None where the logits are not finite."""
        self._lead_count = len(lead.token_ids)
        first = self._branches[0]
        # It goes on for as long as the others do.
        first.token_count = self._lead_count + self._max_depth + 1
        first.token_ids += lead.token_ids[1:]
        (outcome,) = extended([first], lead.logits[-1:], self.sampler)
        return None if isinstance(outcome, Failed) else first.token_ids[-1]

    def advance(self, logits: Tensor) -> BranchStep | None:
        """See `BackgroundJob`."""
        if self._depth == self._token_count:
            return None  # the last tokens are read, which is all
        if any(isinstance(outcome, Failed) for outcome in extended(self._branches, logits, self.sampler)):
            return None  # an explicit request for this proposal raises the error
        self._keep_within_bytes()
        if not self._branches:
            return None
        self._ready = self._told()
        self._depth += 1
        return self._step([branch.token_ids[-1] for branch in self._branches])

    def count_step(self, record: StepRecord) -> None:
        """See `BackgroundJob`."""
        ready, self._ready = self._ready, None
        if ready is not None:
            cost = StepCost(record.seconds, record.sequence_count, record.token_count)
            self.push(replace(ready, cost=cost))

    def fail(self, error: TandemError) -> None:
        """See `BackgroundJob`."""
        self.push(error)

    def _step(self, token_ids: Sequence[int]) -> BranchStep | None:
        if not token_ids or self._depth == self._max_depth:
            return None
        lengths = [self.base_length + accepted for accepted, _ in self._outcomes]
        lengths[0] += self._lead_count
        return BranchStep(token_ids, lengths, self._depth, self._max_depth)

    def _keep_within_bytes(self) -> None:
        """Give up the last branches where a round's messages would be too long; each depth has its share."""
        allowed = MAX_ROUND_BYTES * (self._depth + 1) // self._token_count
        kept = 0
        for branch in self._branches:
            support = branch.distributions[-1] if branch.distributions else None
            ids = len(support.token_ids) if isinstance(support, SparseDistribution) else 0
            size = _BYTES_PER_TOKEN + _BYTES_PER_ID * ids
            if self._bytes + size > allowed:
                break
            self._bytes += size
            kept += 1
        del self._branches[kept:]

    def _told(self) -> DraftedOutcomes:
        is_first = self._depth == 0
        named = self._outcomes[: len(self._branches)] if is_first else []
        supports = [branch.distributions[-1] for branch in self._branches if branch.distributions]
        return DraftedOutcomes(
            base_length=self.base_length,
            depth=self._depth,
            token_ids=tuple(branch.token_ids[self._depth] for branch in self._branches),
            accepted_counts=tuple(accepted for accepted, _ in named),
            next_token_ids=tuple(token_id for _, token_id in named),
            distributions=tuple(support for support in supports if isinstance(support, SparseDistribution)),
            lead_token_ids=tuple(self._branches[0].token_ids[self._depth + 1 : self._token_count]),
        )


def rank(
    logits: Tensor, proposed: Sequence[int], base_length: int, options: DraftOptions, sampler: Sampler
) -> Ranking | None:
    """The tokens that the draft takes to be likely at each position of a proposal and after it.

    The target chooses argmax(log p + G) under `strict`, and argmax(log w + G2) under `residual` and `block`. G and G2
    are keyed noise that the draft can compute as well, so it ranks by log q + noise; without noise at temperature 0.

    Args:
        logits: [len(proposed) + 1, vocabulary_size].
        proposed: The proposed tokens.
        base_length: Tokens before them.
        options: Of the sequence.
        sampler: What computes.

    Returns:
        None where the logits are not finite.
    """
    count = min(_MAX_CANDIDATES, logits.shape[-1])
    if options.sampling.is_greedy:
        scores, token_ids = sampler.topk(logits.float(), count)
        found = Ranking(token_ids.tolist(), scores.tolist(), ())
        return _with_shares(found, proposed)
    probs = sampler.probabilities(logits, [options.sampling] * len(logits))
    is_shared = options.row_kind is RowKind.TOKEN
    # What follows no proposal at all is the target's own sample.
    keys_of = target_keys if is_shared or not proposed else recovery_keys
    keys = torch.from_numpy(keys_of(options.sampling.seed, base_length, len(logits))).to(logits.device)
    scores, token_ids = (probs.log() + gumbel(keys, probs.shape[-1])).topk(count, dim=-1)
    if is_shared:
        return _with_shares(Ranking(token_ids.tolist(), scores.tolist(), ()), proposed)
    columns = torch.tensor(proposed, dtype=torch.int64, device=logits.device)[:, None]
    own = probs[: len(proposed)].gather(1, columns)[:, 0].tolist() if proposed else []
    return _finite(Ranking(token_ids.tolist(), scores.tolist(), own))


def _with_shares(ranking: Ranking, proposed: Sequence[int]) -> Ranking | None:
    """With each proposed token's share of its row's candidates as the belief in it."""
    if _finite(ranking) is None:
        return None
    rows = zip(proposed, ranking.token_ids, ranking.scores, strict=False)
    return Ranking(ranking.token_ids, ranking.scores, [_share(*row) for row in rows])


def _share(token_id: int, token_ids: Sequence[int], scores: Sequence[float]) -> float:
    if token_id not in token_ids:
        return 0.0
    own, highest = scores[token_ids.index(token_id)], scores[0]
    return math.exp(own - highest) / sum(math.exp(score - highest) for score in scores)


def _finite(ranking: Ranking) -> Ranking | None:
    return ranking if all(row[0] - row[0] == 0.0 for row in ranking.scores) else None

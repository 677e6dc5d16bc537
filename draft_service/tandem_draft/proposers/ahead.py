"""Drafting ahead of a verification: continuations of its likely outcomes, pushed before they are asked for."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from tandem.drafting.proposal import (
    Drafting,
    Drawn,
    TokenDraws,
    extend_drafts,
    known_to_target,
    lenient_masks,
    masked_tokens,
)
from tandem.engine.core.background import HeadStart
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Failed, StepRecord
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.rows import Sampler, apply_penalties
from tandem.engine.steps import BranchDraws, BranchStep
from tandem.errors import TandemError
from tandem.model.grammar import GrammarState
from tandem.model.sampling.noise import gumbel, recovery_keys, target_keys
from tandem.model.types import (
    ENDED,
    MAX_AHEAD_TOKENS,
    AheadBudget,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    StepCost,
    common_length,
)
from tandem_draft.proposers.mapping import MappedTrunk

Pushed = asyncio.Queue[DraftedOutcomes | Exception]
"""Messages that go to the coordinator unasked; an error ends the sequence."""


@dataclass(slots=True, eq=False)
class AheadDrafter:
    """Drafts ahead of the verifications of one sequence."""

    engine: Engine[Drafting, Proposal]
    cached: CachedSequence
    options: DraftOptions
    sampler: Sampler
    history: OutcomeHistory
    grammar: GrammarState | None = None
    pushed: Pushed = field(default_factory=asyncio.Queue, init=False)
    """At most a round's depths: the next step empties it."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False)
    _token_ids: list[int] = field(default_factory=list, init=False)
    _round: BranchDrafting | None = field(default=None, init=False)

    def apply(self, step: ProposeStep) -> None:
        """Apply a step's delta, which fits the sequence; end the last round and learn its outcome."""
        delta = step.delta
        token_ids = self._token_ids
        token_ids[delta.base_length :] = delta.token_ids
        last = self._round
        self._round = None
        if last is not None:
            self._learn(last, token_ids[: len(token_ids) - step.proposed_count])
        while not self.pushed.empty():
            self.pushed.get_nowait()

    def begin(
        self, step: ProposeStep, delta: Delta, proposed_count: int, trunk: MappedTrunk | None = None
    ) -> None:
        """Draft ahead of the verification of the last `proposed_count` tokens of the trunk, which the delta makes of
        the sequence in the target's tokens. `trunk` is it in the draft's, where these are others."""
        if step.ahead is None or self.options.with_token_logits:
            return
        if proposed_count > MAX_AHEAD_TOKENS:
            return  # reading it takes a row of the vocabulary for each token
        own = delta if trunk is None else trunk.delta
        if (step.is_answered or trunk is not None) and own.length > self.cached.max_length:
            return  # the longest proposal has one token more than the sequence can hold
        self._token_ids[delta.base_length :] = delta.token_ids
        proposed = tuple(self._token_ids[len(self._token_ids) - proposed_count :])
        completion = self._token_ids[self.options.prompt_length :] if self.grammar is not None else ()
        context = tuple(self._token_ids) if self.options.sampling.penalizes else None
        self._round = BranchDrafting(self, own, proposed, step.ahead, completion, trunk, context)
        self.engine.put_back(self._round)

    def push(self, of_round: BranchDrafting, drafted: DraftedOutcomes | TandemError) -> None:
        """Push what a round has made, if it is still the last one. Called on the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, of_round, drafted)

    def _take(self, of_round: BranchDrafting, drafted: DraftedOutcomes | TandemError) -> None:
        if of_round is self._round or isinstance(drafted, TandemError):
            self.pushed.put_nowait(drafted)

    def _learn(self, last: BranchDrafting, committed: list[int]) -> None:
        following = committed[last.base_length :]
        if last.ranking is None or not following:
            return
        accepted = common_length(following, last.proposed)
        if accepted < len(following):
            self.history.came(last.proposed, last.ranking, accepted, following[accepted])


MAX_ROUND_BYTES = 160_000
"""Maximum size of all messages of a round. Beyond it the last branches are dropped. 40 kB held six outcomes of 200
entries a token."""


@dataclass(slots=True)
class BranchDrafting:
    """The branches of one round of one sequence; a background job of the draft's engine."""

    drafter: AheadDrafter
    """Of the sequence."""
    delta: Delta
    proposed: tuple[int, ...]
    """The proposal that is being verified: the last tokens of the sequence."""
    budget: AheadBudget
    completion: Sequence[int] = ()
    """The completion's tokens, the proposal's at the end, for the grammar."""
    trunk: MappedTrunk | None = None
    """The trunk in the draft's tokens, where these are others than the target's; `delta` is then of the draft's."""
    context: Sequence[int] | None = None
    """All of the sequence's tokens, the proposal's at the end, for penalties; None where nothing is penalized."""
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
    _ready: list[DraftedOutcomes] = field(default_factory=list)
    _texts: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens that were pushed for each branch, where the draft writes text."""

    @property
    def sequence(self) -> CachedSequence:
        return self.drafter.cached

    @property
    def base_length(self) -> int:
        """Length of the sequence that the proposal extends."""
        return self.delta.length - len(self.proposed) if self.trunk is None else self.trunk.base_length

    @property
    def row_count(self) -> int:
        return len(self.proposed) + 1 if self.trunk is None else self.trunk.row_count

    @property
    def max_lead(self) -> int:
        """See `BackgroundJob`. Tokens that are drawn with noise of their position alone do not depend on the round."""
        if self.drafter.options.row_kind is not RowKind.TOKEN or self.trunk is not None:
            return 0
        tokens = self.budget.token_count
        return max(min(tokens, self.drafter.engine.max_length - self.delta.length - tokens - 1), 0)

    def begin(self, logits: Tensor, room: int, lead: HeadStart | None) -> BranchStep | None:
        drafter = self.drafter
        trunk = self.trunk
        shared = None if trunk is None else trunk.tokens
        if trunk is not None:
            logits = trunk.rows(logits)
        logits = known_to_target(logits, drafter.options.vocabulary_size)
        if drafter.grammar is not None:
            kept = len(self.completion) - len(self.proposed)
            masks = lenient_masks(drafter.grammar, self.completion[:kept], self.completion[kept:])
            logits = masked_tokens(logits, masks if trunk is None else masks[trunk.places], shared)
        if self.context is not None:
            options = drafter.options
            logits = apply_penalties(logits, self.context, options.prompt_length, options.sampling)
        ranking = rank(logits, self.proposed, self.base_length, drafter.options, drafter.sampler, trunk)
        if ranking is None:
            return None
        self.ranking = ranking
        # A model with learned positions has none behind its last.
        tokens = min(self.budget.token_count, room, drafter.engine.max_length - self.delta.length)
        if tokens <= 0:
            return None
        count = min(self.budget.branch_count, room // tokens)
        led = 0 if lead is None else len(lead.token_ids)
        reads_last = (
            drafter.engine.keeps_branches
            and count * (tokens + 1) <= room
            and self.delta.length + led + tokens < drafter.engine.max_length
        )
        self._token_count = tokens
        self._max_depth = tokens + reads_last
        inputs = self._choose(ranking, count)
        self._branches = [
            Drafting(
                self.base_length + accepted + 1,
                tokens,
                drafter.options,
                grammar=drafter.grammar,
                before=self._before(accepted, token_id),
                context=self._context(accepted, token_id),
                shared=shared,
            )
            for accepted, token_id in self._outcomes
        ]
        if lead is not None and self._outcomes[:1] == [(len(self.proposed), lead.token_ids[0])]:
            token_id = self._extend_lead(lead)
            if token_id is None:
                return None
            inputs[0] = token_id
        return self._step(inputs)

    def _choose(self, ranking: Ranking, count: int) -> list[int]:
        """Choose up to so many outcomes; the token that each branch begins with."""
        if self.trunk is None:
            self._outcomes = self.drafter.history.likeliest(self.proposed, ranking, count)
            return [token_id for _, token_id in self._outcomes]
        inputs: list[int] = []
        # Some cannot begin a branch, so there are more to choose from.
        for outcome in self.drafter.history.likeliest(self.proposed, ranking, 2 * count):
            if len(inputs) == count:
                break
            if (first := self.trunk.begin(*outcome)) is not None:
                self._outcomes.append(outcome)
                inputs.append(first)
        return inputs

    def _before(self, accepted: int, token_id: int) -> list[int]:
        return [*self.completion[: len(self.completion) - len(self.proposed) + accepted], token_id]

    def _context(self, accepted: int, token_id: int) -> list[int] | None:
        if self.context is None:
            return None
        return [*self.context[: len(self.context) - len(self.proposed) + accepted], token_id]

    def _extend_lead(self, lead: HeadStart) -> int | None:
        """Let the first branch go on behind the lead; its next token, None where the logits are not finite."""
        self._lead_count = len(lead.token_ids)
        first = self._branches[0]
        # It goes on for as long as the others do.
        first.token_count = self._lead_count + self._max_depth + 1
        first.token_ids += lead.token_ids[1:]
        (outcome,) = extend_drafts([first], lead.logits[-1:], self.drafter.sampler)
        return None if isinstance(outcome, Failed) or first.is_cut else first.token_ids[-1]

    def advance(self, logits: Tensor) -> BranchStep | None:
        if self._depth == self._token_count:
            return None  # the last tokens are read, which is all
        if any(
            isinstance(outcome, Failed)
            for outcome in extend_drafts(self._branches, logits, self.drafter.sampler)
        ):
            return None  # an explicit request for this proposal raises the error
        if any(branch.is_cut for branch in self._branches):
            return None
        self._depth += 1
        if self.trunk is None or self.trunk.tokens is not None:
            self._keep_within_bytes()
            if not self._branches:
                return None
            self._ready.append(self._take_depth(self._token_count))
        else:
            self._ready += self._certain_depths(self.trunk)
        return self._step([branch.last_read for branch in self._branches])

    @property
    def draws(self) -> BranchDraws | None:
        """See `BackgroundJob`. Where the draft writes text, the host reads each token."""
        writes_text = self.trunk is not None and self.trunk.tokens is None
        if writes_text or self._lead_count or not all(branch.is_free for branch in self._branches):
            return None
        return BranchDraws(TokenDraws, self._branches, self._token_count)

    def take(self, drawn: Sequence[Drawn]) -> None:
        """See `BackgroundJob`."""
        self._branches = [each.drafting for each in drawn]
        if any(isinstance(each.outcome, Failed) for each in drawn):
            return  # an explicit request for this proposal raises the error
        for depth in range(self._token_count):
            self._depth = depth + 1
            self._keep_within_bytes()
            if not self._branches:
                return
            self._ready.append(self._take_depth(self._depth))

    def count_step(self, record: StepRecord) -> None:
        ready = self._ready
        self._ready = []
        cost = StepCost(record.seconds, record.sequence_count, record.token_count)
        for each in ready:
            self.drafter.push(self, replace(each, cost=cost))

    def fail(self, error: TandemError) -> None:
        self.drafter.push(self, error)

    def _step(self, token_ids: Sequence[int]) -> BranchStep | None:
        if not token_ids or self._depth == self._max_depth:
            return None
        ends = None if self.trunk is None else self.trunk.ends
        lengths = [
            self.base_length + accepted if ends is None else ends[accepted] for accepted, _ in self._outcomes
        ]
        lengths[0] += self._lead_count
        return BranchStep(self.sequence, token_ids, lengths, self._depth, self._max_depth)

    def _keep_within_bytes(self) -> None:
        """Give up the last branches where a round's messages would be too long; each depth has its share."""
        allowed = MAX_ROUND_BYTES * self._depth // self._token_count
        kept = 0
        for branch in self._branches:
            ids = len(branch.distributions[self._depth - 1].token_ids) if branch.distributions else 0
            # A token and its support's size; an id and its probability
            size = 6 + 8 * ids
            if self._bytes + size > allowed:
                break
            self._bytes += size
            kept += 1
        del self._branches[kept:]

    def _take_depth(self, known: int) -> DraftedOutcomes:
        """The outcomes' tokens at this depth; of the first outcome all of those that are told, `known`."""
        depth = self._depth - 1
        return replace(
            self._outcomes_at(depth, [branch.token_ids[depth] for branch in self._branches]),
            distributions=tuple(
                branch.distributions[depth] for branch in self._branches if branch.distributions
            ),
            lead_token_ids=tuple(self._branches[0].token_ids[depth + 1 : known]),
        )

    def _outcomes_at(self, depth: int, token_ids: Sequence[int]) -> DraftedOutcomes:
        named = self._outcomes[: len(token_ids)] if depth == 0 else []
        return DraftedOutcomes(
            base_length=self.base_length,
            depth=depth,
            token_ids=tuple(token_ids),
            accepted_counts=tuple(accepted for accepted, _ in named),
            next_token_ids=tuple(token_id for _, token_id in named),
        )

    def _certain_depths(self, trunk: MappedTrunk) -> list[DraftedOutcomes]:
        """The depths that are certain now, where the draft writes text.

        The target's tokens of a word are known when it has ended. What is told of a text that turns out otherwise ends
        there.
        """
        is_last = self._depth == self._token_count
        texts = [trunk.said(branch.token_ids, is_last=is_last) for branch in self._branches]
        self._texts = self._texts or [()] * len(texts)
        told = len(self._texts[0])
        depths = self._token_count if is_last else min(min(map(len, texts)), self._token_count)
        for depth in range(told, depths):
            self._texts = [
                (*old, new[depth] if new[:depth] == old and depth < len(new) else ENDED)
                for old, new in zip(self._texts, texts, strict=True)
            ]
        columns = [*zip(*self._texts, strict=True)]
        return [
            self._outcomes_at(depth, columns[depth])
            for depth in range(told, depths)
            if depth == 0 or max(columns[depth]) != ENDED
        ]


def rank(
    logits: Tensor,
    proposed: Sequence[int],
    base_length: int,
    options: DraftOptions,
    sampler: Sampler,
    trunk: MappedTrunk | None = None,
) -> Ranking | None:
    """Rank the likely tokens at each position of a proposal and after it; None where the logits are not finite.

    The target chooses argmax(log p + G) under `strict`, and argmax(log w + G2) under `residual` and `block`. G and G2
    are keyed noise that the draft can compute as well, so it ranks by log q + noise; without noise at temperature 0,
    and where the target draws with noise of its own.

    Logits are [len(proposed) + 1, vocabulary_size]; with a trunk, its `rows`, whose columns it says.
    """
    count = min(16, logits.shape[-1])
    places = [*range(len(proposed) + 1)] if trunk is None else trunk.places
    if options.sampling.is_greedy:
        scores, columns = sampler.topk(logits.float(), count)
        return _ranking(columns, scores, proposed, places, trunk)
    probs = sampler.probabilities(logits, [options.sampling] * len(logits))
    is_shared = options.row_kind is RowKind.TOKEN
    # What follows no proposal at all is the target's own sample.
    weights = probs.log()
    if not options.noise_is_unknown:
        keys_of = target_keys if is_shared or not proposed else recovery_keys
        keys = torch.from_numpy(keys_of(options.sampling.seed, base_length, len(proposed) + 1)[places])
        ids = None if trunk is None or trunk.tokens is None else trunk.tokens.target_ids
        weights += gumbel(keys.to(logits.device), probs.shape[-1] if ids is None else ids)
    scores, columns = weights.topk(count, dim=-1)
    if is_shared:
        return _ranking(columns, scores, proposed, places, trunk)
    wanted = [proposed[place] for place in places if place < len(proposed)]
    if trunk is not None and trunk.tokens is not None:
        wanted = [trunk.tokens.columns.get(token_id, -1) for token_id in wanted]
    at = torch.tensor(wanted, dtype=torch.int64, device=logits.device)[:, None]
    own = probs[: len(wanted)].gather(1, at.clamp(min=0))[:, 0].tolist() if wanted else []
    beliefs = [prob if column >= 0 else 0.0 for prob, column in zip(own, wanted, strict=True)]
    return _ranking(columns, scores, proposed, places, trunk, beliefs)


def _ranking(
    columns: Tensor,
    scores: Tensor,
    proposed: Sequence[int],
    places: Sequence[int],
    trunk: MappedTrunk | None,
    beliefs: Sequence[float] | None = None,
) -> Ranking | None:
    """The ranking of columns at some places of a proposal; None where the scores are not finite.

    Without beliefs in the proposed tokens of these places, each one's share of its row's candidates is taken.
    """
    ids = columns.tolist()
    values = scores.tolist()
    if not all(row[0] - row[0] == 0.0 for row in values):
        return None
    if trunk is not None:
        ids, values = trunk.candidates(ids, values)
    rows = dict(zip(places, zip(ids, values, strict=True), strict=True))
    if beliefs is None:
        known = [place for place in places if place < len(proposed)]
        beliefs = [dict(_shares(rows[place])).get(proposed[place], 0.0) for place in known]
    # Nothing is known at the other places, whose proposed tokens the draft has drawn.
    sure = dict(zip(places, beliefs, strict=False))
    return Ranking(
        [rows.get(place, ((), ())) for place in range(len(proposed) + 1)],
        [sure.get(place, 1.0) for place in range(len(proposed))],
    )


_EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
"""Upper ends of the classes of shares; the last class ends at 1."""
_DOUBT = 6.0
"""A class's own counts weigh as much as this many imagined ones."""


Candidates: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""Tokens that may stand at a position, the best first, and their scores in nats, descending: log probabilities, with
the noise that decides where noise does."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The draft's view of one verification: a row for each proposed token, and one for the token after them."""

    rows: Sequence[Candidates]
    confidences: Sequence[float]
    """The draft's belief in each proposed token, 0 to 1; shape [K]."""


class _Calibration:
    """Frequency with which beliefs of each strength came true."""

    def __init__(self, prior_scale: float) -> None:
        self.rates = [prior_scale * (low + high) / 2 for low, high in pairwise((0.0, *_EDGES, 1.0))]
        self._priors = tuple(self.rates)
        self._hits = [0.0] * len(self.rates)
        self._counts = [0.0] * len(self.rates)

    def rate(self, share: float) -> float:
        return self.rates[bisect_left(_EDGES, share)]

    def add(self, share: float, came_true: bool) -> None:
        i = bisect_left(_EDGES, share)
        self._hits[i] += came_true
        self._counts[i] += 1.0
        # Counts are halved beyond this: what came true long ago was about other text
        if self._counts[i] > 2000.0:
            self._hits[i] /= 2
            self._counts[i] /= 2
        self.rates[i] = (self._hits[i] + _DOUBT * self._priors[i]) / (self._counts[i] + _DOUBT)


class OutcomeHistory:
    """Record of the outcomes that came true, for sequences whose tokens are decided alike."""

    def __init__(self) -> None:
        self.accepted_shares = _Calibration(0.95)
        self._recovered = _Calibration(0.8)
        self._bonus = _Calibration(0.95)

    def likeliest(self, proposed: Sequence[int], ranking: Ranking, count: int) -> list[tuple[int, int]]:
        """The outcomes (accepted, next token) with the highest probability, best first.

        P(a accepted) * P(t follows, given a), each calibrated by how often equal confidence was right.
        """
        found: list[tuple[float, int, int]] = []
        reached = 1.0
        for position, token_id in enumerate(proposed):
            accepted = self.accepted_shares.rate(ranking.confidences[position])
            missed = reached * (1.0 - accepted)
            for candidate, share in _shares(ranking.rows[position], token_id):
                found.append((missed * self._recovered.rate(share), position, candidate))
            reached *= accepted
        for candidate, share in _shares(ranking.rows[len(proposed)]):
            found.append((reached * self._bonus.rate(share), len(proposed), candidate))
        found.sort(key=lambda outcome: -outcome[0])
        return [(accepted, token_id) for _, accepted, token_id in found[:count]]

    def came(self, proposed: Sequence[int], ranking: Ranking, accepted: int, next_token_id: int) -> None:
        for position in range(min(accepted + 1, len(proposed))):
            self.accepted_shares.add(ranking.confidences[position], position < accepted)
        is_bonus = accepted == len(proposed)
        shares = _shares(ranking.rows[accepted], None if is_bonus else proposed[accepted])
        calibration = self._bonus if is_bonus else self._recovered
        for candidate, share in shares:
            calibration.add(share, candidate == next_token_id)


def _shares(row: Candidates, excluded: int | None = None) -> list[tuple[int, float]]:
    """Each candidate with its share of the softmax over the candidates, without the excluded one."""
    pairs = [
        (token_id, score)
        for token_id, score in zip(*row, strict=True)
        if token_id != excluded and score > -math.inf
    ]
    if not pairs:
        return []
    highest = pairs[0][1]
    weights = [math.exp(score - highest) for _, score in pairs]
    total = sum(weights)
    return [(token_id, weight / total) for (token_id, _), weight in zip(pairs, weights, strict=True)]

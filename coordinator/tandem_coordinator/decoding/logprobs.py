"""How probable draft and target find the tokens of a completion: log probabilities, which come beside the target's
rows, and what the rows of a rule say."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.acceptance.rounds import Round
from tandem.acceptance.rows import support_row
from tandem.errors import ProtocolError
from tandem.model.types import (
    Acceptance,
    Chunk,
    DenseRow,
    Float32Array,
    GenerationRequest,
    Proposal,
    RowLogprobs,
    SamplingParams,
    TargetRow,
    TokenLogprobs,
    TokenRow,
    Verification,
    own_token_ids,
)
from tandem_coordinator.decoding.completion import Completion


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Adds to the chunks of a completion what its request wants to know of their tokens."""

    _top_count: int | None
    """Most probable tokens that are named beside each; None: no log probabilities are wanted."""
    _with_probs: bool
    """True if the probabilities of draft and target are wanted."""
    _with_sampled: bool
    """True if raw and processed log probabilities are wanted."""
    _sampling: SamplingParams

    def __call__(
        self, chunk: Chunk, proposal: Proposal, verification: Verification, acceptance: Acceptance
    ) -> Chunk:
        """The chunk of a round, without what the round says of tokens past the completion's end."""
        kept = acceptance.kept(proposal)[: len(chunk.token_ids)]
        if self._top_count is not None:
            chunk = replace(chunk, logprobs=token_logprobs(verification, kept, self._top_count))
        if self._with_probs and kept:
            own = Round(proposal, verification, self._sampling)
            probs = [token_probs(own, index, token_id) for index, token_id in enumerate(kept)]
            draft_probs, target_probs = zip(*probs, strict=True)
            chunk = replace(chunk, draft_probs=draft_probs, target_probs=target_probs)
        if self._with_sampled:
            raw, processed = sampled_logprobs(verification, kept)
            chunk = replace(chunk, raw_logprobs=raw, processed_logprobs=processed)
        return chunk


def details_of(request: GenerationRequest, sampling: SamplingParams) -> TokenDetails | None:
    """The details that a request asks for of its tokens; None for none."""
    if request.logprobs is None and not request.probabilities and not request.sampled_logprobs:
        return None
    return TokenDetails(request.logprobs, request.probabilities, request.sampled_logprobs, sampling)


def token_probs(own: Round, index: int, token_id: int) -> tuple[float, float]:
    """Probability of a token at a row's position by the draft and by the target; NaN where proposal or row do not say.

    A draft that sends no distribution, and a row of one token, say nothing; nor is there a draft behind the proposal.
    """
    distributions = own.proposal.distributions
    row = own.verification.rows[index]
    drafted = targeted = math.nan
    if index < len(distributions):
        drafted = float(distributions[index].probs[distributions[index].token_ids == token_id].sum())
    if not isinstance(row, TokenRow):
        known = support_row(own, index)
        inside = known.token_ids == token_id
        if inside.any():
            targeted = float(known.probs[inside][0])
        elif token_id == known.outside_token_id and known.outside_prob is not None:
            targeted = known.outside_prob
    return drafted, targeted


Verify = Callable[[Completion, Proposal], Awaitable[Verification]]


async def prompt_logprobs(
    prompt: Completion, verify: Verify, top_count: int, most: int
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of a prompt's tokens, as if each had been proposed, `most` at a time: messages have room for so
    many rows and one more. The prompt, a completion that has not begun, is used up; `verify` answers with dense
    rows."""
    token_ids = prompt.token_ids[:]
    found = [TokenLogprobs(math.nan)]
    while len(found) < len(token_ids):
        known = len(found)
        prompt.token_ids[:] = token_ids[:known]
        proposal = Proposal(known, tuple(token_ids[known : known + most]))
        found += token_logprobs(await verify(prompt, proposal), proposal.token_ids, top_count)
    return tuple(found)


def with_most_probable(found: Sequence[TokenLogprobs], count: int) -> tuple[TokenLogprobs, ...]:
    """The log probabilities with so many of the most probable tokens."""
    return tuple(
        replace(each, top_token_ids=each.top_token_ids[:count], top_logprobs=each.top_logprobs[:count])
        for each in found
    )


def token_logprobs(
    verification: Verification, token_ids: Sequence[int], top_count: int
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of the tokens that a round keeps, from the rows at their positions."""
    if not verification.logprobs:
        return tuple(
            _at(row, token_id, top_count) for row, token_id in zip(verification.rows, token_ids, strict=False)
        )
    beside = zip(verification.rows, verification.logprobs, token_ids, strict=False)
    return tuple(_beside(row, found, token_id, top_count) for row, found, token_id in beside)


def sampled_logprobs(
    verification: Verification, token_ids: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Raw and processed log probabilities of the tokens that a round keeps."""
    raw: list[float] = []
    processed: list[float] = []
    for row, found, token_id in zip(verification.rows, verification.logprobs, token_ids, strict=False):
        own_ids = own_token_ids(row)
        if token_id not in own_ids:
            raise ProtocolError("target service: its row does not name a token that was decided on")
        place = own_ids.index(token_id)
        raw.append(found.raw_logprobs[place])
        processed.append(found.processed_logprobs[place])
    return tuple(raw), tuple(processed)


def _beside(row: TargetRow, found: RowLogprobs, token_id: int, top_count: int) -> TokenLogprobs:
    tops = zip(found.top_token_ids, found.top_logprobs, strict=True)
    # One that a grammar or the request forbids is no alternative
    likely = {top_id: logprob for top_id, logprob in tops if math.isfinite(logprob)}
    logprob = likely.get(token_id)
    if logprob is None:
        logprob = dict(zip(own_token_ids(row), found.token_logprobs, strict=False)).get(token_id)
    if logprob is None:
        raise ProtocolError("target service: it sent no log probability of a token that its rows decide on")
    return TokenLogprobs(logprob, tuple(likely)[:top_count], tuple(likely.values())[:top_count])


def _at(row: object, token_id: int, top_count: int) -> TokenLogprobs:
    if not isinstance(row, DenseRow):
        raise ProtocolError("target service: it sent a row without logits, and log probabilities need them")
    logprobs = row.logits.astype(np.float64) - row.logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    # One that a grammar or the request forbids is no alternative
    top = [each for each in _largest(row.logits, top_count) if math.isfinite(logprobs[each])]
    rank = 1 + int((row.logits > row.logits[token_id]).sum())
    return TokenLogprobs(float(logprobs[token_id]), tuple(top), tuple(float(logprobs[i]) for i in top), rank)


def _largest(values: Float32Array, count: int) -> list[int]:
    """Indices of the largest values, the largest first, the lowest index first among equals."""
    if count == 0:
        return []
    count = min(count, values.size)
    # Sorting a whole vocabulary takes 20 times as long.
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = np.argsort(-values[candidates], kind="stable")
    return [int(i) for i in candidates[order[:count]]]

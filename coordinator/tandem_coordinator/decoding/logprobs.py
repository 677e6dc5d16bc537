"""How probable draft and target find the tokens of a completion: log probabilities, from dense rows, and what the rows
of a rule say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
    SamplingParams,
    TokenLogprobs,
    TokenRow,
    Verification,
)
from tandem_coordinator.decoding.completion import Completion
from tandem_coordinator.decoding.loop import AcceptanceRule, Verifier


class TokenRecorder:
    """Records what the request wants to know of a completion's tokens, and adds it to the chunks."""

    def __init__(self, request: GenerationRequest, sampling: SamplingParams) -> None:
        self._top_count, self._with_probs, self._sampling = request.logprobs, request.probabilities, sampling
        self._logprobs: tuple[TokenLogprobs, ...] = ()
        self._probs: tuple[tuple[float, float], ...] = ()

    @property
    def _is_idle(self) -> bool:
        return self._top_count is None and not self._with_probs

    def recording(self, accept: AcceptanceRule) -> AcceptanceRule:
        """Wrap a rule so that what is wanted of the tokens that it keeps is recorded."""
        if self._is_idle:
            return accept

        def recorded(proposal: Proposal, verification: Verification) -> Acceptance:
            acceptance = accept(proposal, verification)
            kept = acceptance.kept(proposal)
            if self._top_count is not None:
                self._logprobs = token_logprobs(verification, kept, self._top_count)
            if self._with_probs:
                own = Round(proposal, verification, self._sampling)
                self._probs = tuple(token_probs(own, index, token_id) for index, token_id in enumerate(kept))
            return acceptance

        return recorded

    def added_to(self, chunk: Chunk) -> Chunk:
        """The chunk of the last round with what was recorded, without tokens past the completion's end."""
        if self._is_idle:
            return chunk
        count = len(chunk.token_ids)
        draft_probs, target_probs = (
            zip(*self._probs[:count], strict=True) if self._probs and count else ((), ())
        )
        return replace(
            chunk, logprobs=self._logprobs[:count], draft_probs=draft_probs, target_probs=target_probs
        )


def token_probs(own: Round, index: int, token_id: int) -> tuple[float, float]:
    """Probability of a token at a row's position by the draft and by the target; NaN where proposal or row do not say.

    A draft that sends no distribution, and a row of one token, say nothing; nor is there a draft behind the proposal.
    """
    distributions, row = own.proposal.distributions, own.verification.rows[index]
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


async def prompt_logprobs(
    prompt: Completion, verifier: Verifier, top_count: int, most: int
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of a prompt's tokens, as if each had been proposed, `most` at a time: messages have room for so
    many rows and one more. The prompt, a completion that has not begun, is used up; the verifier answers with dense
    rows."""
    token_ids = prompt.token_ids[:]
    found = [TokenLogprobs(math.nan)]
    while len(found) < len(token_ids):
        known = len(found)
        prompt.token_ids[:] = token_ids[:known]
        proposal = Proposal(known, tuple(token_ids[known : known + most]))
        found += token_logprobs(await verifier.verify(prompt, proposal), proposal.token_ids, top_count)
    return tuple(found)


def token_logprobs(
    verification: Verification, token_ids: Sequence[int], top_count: int
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of the tokens that a round keeps, from the rows at their positions."""
    return tuple(
        _at(row, token_id, top_count) for row, token_id in zip(verification.rows, token_ids, strict=False)
    )


def _at(row: object, token_id: int, top_count: int) -> TokenLogprobs:
    if not isinstance(row, DenseRow):
        raise ProtocolError("target service: it sent a row without logits, and log probabilities need them")
    logprobs = row.logits.astype(np.float64) - row.logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    top = _largest(row.logits, top_count)
    return TokenLogprobs(float(logprobs[token_id]), tuple(top), tuple(float(logprobs[i]) for i in top))


def _largest(values: Float32Array, count: int) -> list[int]:
    """Indices of the largest values, the largest first, the lowest index first among equals."""
    if count == 0:
        return []
    count = min(count, values.size)
    # Sorting a whole vocabulary takes 20 times as long.
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = np.argsort(-values[candidates], kind="stable")
    return [int(i) for i in candidates[order[:count]]]

"""How probable the target finds the tokens of a completion: log probabilities, from dense rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coordinator.decoding.completion import Completion
from coordinator.decoding.loop import AcceptanceRule, Verifier
from tandem.errors import ProtocolError
from tandem.types import (
    Acceptance,
    Chunk,
    DenseRow,
    Float32Array,
    FloatArray,
    NextToken,
    Proposal,
    TokenLogprobs,
    Verification,
)


class LogprobsRecorder:
    """Records the log probabilities of a completion's tokens, and adds them to its chunks."""

    def __init__(self, top_count: int | None) -> None:
        """Record this many of the most probable tokens at each position; None: record nothing."""
        self._top_count = top_count
        self._recorded: tuple[TokenLogprobs, ...] = ()

    def recording(self, accept: AcceptanceRule) -> AcceptanceRule:
        """Wrap a rule so that it records the log probabilities of the tokens that it keeps."""
        if self._top_count is None:
            return accept
        top_count = self._top_count

        def recorded(proposal: Proposal, verification: Verification) -> Acceptance:
            acceptance = accept(proposal, verification)
            kept = [*proposal.token_ids[: acceptance.accepted_count]]
            if acceptance.next_token is not NextToken.NONE:
                kept.append(acceptance.next_token_id)
            self._recorded = token_logprobs(verification, kept, top_count)
            return acceptance

        return recorded

    def added_to(self, chunk: Chunk) -> Chunk:
        """The chunk of the last round with its log probabilities, without tokens past the completion's end."""
        if self._top_count is None:
            return chunk
        return replace(chunk, logprobs=self._recorded[: len(chunk.token_ids)])


async def prompt_logprobs(
    prompt: Completion, verifier: Verifier, top_count: int, most: int
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of a prompt's tokens, as if each had been proposed.

    Args:
        prompt: A completion that has not begun, which this uses up.
        verifier: Answers with dense rows.
        top_count: How many of the most probable tokens to give at each position.
        most: Tokens to verify at a time: messages have room for so many rows and one more.

    Raises:
        ProtocolError: a row is not dense.
    """
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
    """Log probabilities of the tokens that a round keeps, from the rows at their positions.

    Raises:
        ProtocolError: a row is not dense.
    """
    return tuple(
        _at(row, token_id, top_count) for row, token_id in zip(verification.rows, token_ids, strict=False)
    )


def _at(row: object, token_id: int, top_count: int) -> TokenLogprobs:
    if not isinstance(row, DenseRow):
        raise ProtocolError("target service: it sent a row without logits, and log probabilities need them")
    logprobs = _log_softmax(row.logits.astype(np.float64))
    top = _largest(row.logits, top_count)
    return TokenLogprobs(float(logprobs[token_id]), tuple(top), tuple(float(logprobs[i]) for i in top))


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted: FloatArray = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _largest(values: Float32Array, count: int) -> list[int]:
    """Indices of the largest values, the largest first, the lowest index first among equals."""
    if count == 0:
        return []
    count = min(count, values.size)
    # Sorting a whole vocabulary takes 20 times as long.
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    order = np.argsort(-values[candidates], kind="stable")
    return [int(i) for i in candidates[order[:count]]]

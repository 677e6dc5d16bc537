"""Checks of what a draft service proposes: whether the target could verify it, and a rule decide on it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ProtocolError
from tandem.types import DenseLogits, DraftDistribution, Proposal


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of a proposal."""

    num_speculative_tokens: int
    """Tokens to propose in a round."""
    vocabulary_size: int
    """The target's; proposed ids must be below it."""
    keeps_proposals: bool = False
    """True if the text depends on what is proposed, and must not depend on time."""


def check_proposal(
    proposal: Proposal, base_length: int, max_tokens: int, vocabulary_size: int, *, with_token_logits: bool
) -> None:
    """Refuse a proposal that the target could not verify, or no rule could decide on.

    Raises:
        ProtocolError: it extends another sequence, is too long, holds unknown ids, lacks the logits that were
            asked for, or carries distributions from which its tokens cannot have been drawn.
    """
    if proposal.base_length != base_length:
        raise ProtocolError(
            f"draft service: its proposal extends {proposal.base_length} tokens; it must extend {base_length}"
        )
    if len(proposal) > max_tokens:
        raise ProtocolError(
            f"draft service: it proposed {len(proposal)} tokens; at most {max_tokens} were asked for"
        )
    unknown = next((token_id for token_id in proposal.token_ids if not 0 <= token_id < vocabulary_size), None)
    if unknown is not None:
        raise ProtocolError(
            f"draft service: it proposed token id {unknown}; ids must be in 0..{vocabulary_size - 1}"
        )
    if with_token_logits and proposal.token_ids and proposal.token_logits is None:
        raise ProtocolError("draft service: it sent no logits for its tokens; they were asked for")
    for token_id, distribution in zip(proposal.token_ids, proposal.distributions, strict=False):
        check_distribution(token_id, distribution, vocabulary_size)


def check_distribution(token_id: int, distribution: DraftDistribution, vocabulary_size: int) -> None:
    """Refuse a distribution that the token cannot have been drawn from.

    Raises:
        ProtocolError: it gives the token no probability, or names unknown ids.
    """
    if isinstance(distribution, DenseLogits):
        raise ProtocolError(
            "draft service: it sent a whole distribution; only its most probable tokens were asked for"
        )
    support = distribution.token_ids.tolist()
    if token_id not in support:
        raise ProtocolError(
            f"draft service: it proposed token id {token_id}, to which its own distribution gives no probability"
        )
    if min(support) < 0 or max(support) >= vocabulary_size:
        raise ProtocolError(
            f"draft service: it sent the probability of an unknown token; ids must be in 0..{vocabulary_size - 1}"
        )

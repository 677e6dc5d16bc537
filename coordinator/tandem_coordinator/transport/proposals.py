"""Checks of proposals, whoever made them: a draft service, or a target's own head."""

from __future__ import annotations

from tandem.errors import ProtocolError
from tandem.model.types import Proposal, SparseDistribution
from tandem.wire.common import sums_to_one


def check_proposal(
    service: str,
    proposal: Proposal,
    base_length: int,
    max_tokens: int,
    vocabulary_size: int,
    *,
    with_token_logits: bool,
) -> None:
    """Refuse a proposal that the target could not verify, or no rule could decide on."""
    token_ids = proposal.token_ids
    wrong = ""
    if proposal.base_length != base_length:
        wrong = f"its proposal extends {proposal.base_length} tokens; it must extend {base_length}"
    elif len(token_ids) > max_tokens:
        wrong = f"it proposed {len(token_ids)} tokens; at most {max_tokens} were asked for"
    elif token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary_size:
        unknown = next(each for each in token_ids if not 0 <= each < vocabulary_size)
        wrong = f"it proposed token id {unknown}; ids must be in 0..{vocabulary_size - 1}"
    elif with_token_logits and token_ids and proposal.token_logits is None:
        wrong = "it sent no logits for its tokens; they were asked for"
    if wrong:
        raise ProtocolError(f"{service}: {wrong}")
    for token_id, distribution in zip(token_ids, proposal.distributions, strict=False):
        check_distribution(service, token_id, distribution, vocabulary_size)


def check_distribution(
    service: str, token_id: int, distribution: SparseDistribution, vocabulary_size: int
) -> None:
    """Refuse a distribution that the token cannot have been drawn from."""
    # Supports are short: numpy takes longer to begin than Python's own functions to end.
    support = distribution.token_ids.tolist()
    probs = distribution.probs.tolist()
    total = sum(probs)
    wrong = ""
    if not sums_to_one(total) or min(probs) < 0.0:
        wrong = f"a sparse distribution sums to {total:g}; it must sum to 1, with nothing below 0"
    elif len(set(support)) != len(support):
        wrong = "a sparse distribution names a token twice"
    elif token_id not in support:
        wrong = f"it proposed token id {token_id}, to which its own distribution gives no probability"
    elif min(support) < 0 or max(support) >= vocabulary_size:
        wrong = f"it sent the probability of an unknown token; ids must be in 0..{vocabulary_size - 1}"
    if wrong:
        raise ProtocolError(f"{service}: {wrong}")

"""Drafting ahead: what would follow the outcomes of a verification, drafted while the target verifies."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types.rounds import SparseDistribution, StepCost

MAX_BRANCHES = 64
"""Bound of a budget's branches."""
MAX_AHEAD_TOKENS = 64
"""Bound of a budget's tokens for each branch."""


@dataclass(frozen=True, slots=True)
class AheadBudget:
    """How far a draft may draft ahead of one verification."""

    branch_count: int
    """Most outcomes to draft for."""
    token_count: int
    """Most tokens to draft for each."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftedOutcomes:
    """One depth of the continuations of some outcomes, the likeliest outcome first.

    An outcome of a round is (a, t): the first a proposed tokens are accepted, and token t follows them.
    """

    base_length: int
    """Length of the sequence that the round's proposal extends."""
    depth: int
    """Number of tokens of each continuation that were pushed before."""
    token_ids: tuple[int, ...]
    """The next token of each continuation; fewer than outcomes where the last ones were given up."""
    accepted_counts: tuple[int, ...] = ()
    """`a` of each outcome; given with the first depth only."""
    next_token_ids: tuple[int, ...] = ()
    """`t` of each outcome; given with the first depth only."""
    distributions: tuple[SparseDistribution, ...] = ()
    """Distribution that each of `token_ids` was drawn from; empty for deterministic proposals."""
    lead_token_ids: tuple[int, ...] = ()
    """Tokens of the first continuation behind this depth's, where the draft is ahead with it."""
    cost: StepCost | None = None
    """Cost of the step of this depth; None where it was not measured."""

"""Rejection sampling: decides which part of a proposal is kept. All functions are pure; random numbers are arguments.

`resolve` turns options into a rule, whose `accept` decides a `Round`.
"""

from coordinator.rejection.rounds import KEYED, MessageRounds, Noise, Round, RowError
from coordinator.rejection.strategies import (
    STRATEGIES,
    AcceptanceRule,
    RuleError,
    Strategy,
    find_strategy,
    resolve,
)

__all__ = [
    "KEYED",
    "STRATEGIES",
    "AcceptanceRule",
    "MessageRounds",
    "Noise",
    "Round",
    "RowError",
    "RuleError",
    "Strategy",
    "find_strategy",
    "resolve",
]

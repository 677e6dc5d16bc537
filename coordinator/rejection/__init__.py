"""Rejection sampling: decides which part of a proposal is kept. All functions are pure; random numbers are arguments.

`resolve` turns options into a rule, whose `accept` decides a `Round`.
"""

from coordinator.rejection.resolution import AcceptanceRule, resolve
from coordinator.rejection.rounds import KEYED, MessageRounds, Noise, Round, RowError
from coordinator.rejection.strategies import STRATEGIES, RuleError, Strategy, find_strategy

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

"""Rejection sampling: decides which part of a proposal is kept. All functions are pure; random numbers are arguments.

`resolve` turns options into a rule, `draw_uniforms` draws a round's random numbers, and the rule's `accept` decides.
"""

from coordinator.rejection.errors import RowError, RuleError
from coordinator.rejection.options import RejectionOptions
from coordinator.rejection.resolution import AcceptanceRule, problems, resolve
from coordinator.rejection.strategies import STRATEGIES, Strategy, Support, find_strategy
from coordinator.rejection.uniforms import Uniforms, draw_uniforms

__all__ = [
    "STRATEGIES",
    "AcceptanceRule",
    "RejectionOptions",
    "RowError",
    "RuleError",
    "Strategy",
    "Support",
    "Uniforms",
    "draw_uniforms",
    "find_strategy",
    "problems",
    "resolve",
]

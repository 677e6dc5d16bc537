"""Rejection sampling: what is kept of a proposal. Pure functions of numbers that were drawn beforehand.

`resolve` makes a rule of options, `draw_uniforms` the random numbers of a round, and the rule's `accept` decides.
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

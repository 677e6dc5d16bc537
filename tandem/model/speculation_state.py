"""State of speculation, for one request or for a coordinator: whether it works now, and if not why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DecidingFigure:
    """One of the numbers that a decision compared."""

    name: str
    """The thing that was measured or predicted, for instance "without"."""
    value: float
    unit: str
    """For instance "tokens/s"."""

    @property
    def words(self) -> str:
        value = f"{self.value:,.0f}" if float(self.value).is_integer() else f"{self.value:,.4g}"
        return f"{self.name} {value}"

    def __str__(self) -> str:
        return f"{self.words} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """State of speculation: whether a draft proposes tokens, how many, and why."""

    is_on: bool
    """False: the target works alone."""
    num_speculative_tokens: int
    """Tokens that a proposal has at the moment; 0 when speculation is off."""
    reason: str = ""
    """Reason, in a few words; empty when speculation works as configured."""
    figures: tuple[DecidingFigure, ...] = ()
    """The two numbers that decided it; none where a setting or a missing draft did."""

    @property
    def explanation(self) -> str:
        """The reason and its numbers on one line; empty when there is nothing to explain."""
        if not self.figures:
            return self.reason
        have_one_unit = len({figure.unit for figure in self.figures}) == 1
        *others, last = self.figures
        words = [*(figure.words if have_one_unit else str(figure) for figure in others), str(last)]
        return f"{self.reason} ({', '.join(words)})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "explanation": self.explanation}


@dataclass(frozen=True, slots=True)
class SpeculationDecision:
    """Number of tokens that requests of one kind propose at one load, and the prediction that decided it."""

    target: str
    """Address of the target that the requests share."""
    draft: str
    """Name of the draft's model."""
    rule: str
    temperatures: str
    """Range of temperatures, for instance "0.85-1.15"."""
    load: int
    """Sequences that share the target."""
    num_speculative_tokens: int
    """K; 0: the target works alone."""
    best_draft_length: int
    """The K above 0 that the target alone is compared with: the present one, else the best; 0 before any prediction."""
    gain: float
    """Predicted tokens per second with that K, over those of the target alone; 0 before anything was measured."""
    predicted_seconds: float
    measured_seconds: float
    """Measured seconds of the same rounds, in total."""
    round_seconds: tuple[float, ...] = ()
    """Predicted seconds of a round that proposes 0, 1, ... tokens."""
    acceptance_rates: tuple[float, ...] = ()
    """Conditional acceptance rate at each position."""
    draft_step_seconds: float = 0.0
    """Predicted seconds of one step of the draft."""
    message_seconds: float = 0.0
    """Predicted seconds of a drafted round in which neither service computes."""
    ahead_outcomes: int = 0
    """Outcomes of a verification that rounds draft ahead for; 0: they do not draft ahead."""
    alone_message_seconds: float = 0.0
    """Predicted seconds of a round without a proposal in which the target does not compute."""

    @property
    def reason(self) -> str:
        """One line: "batch 16: K = 0, predicted 0.86x with K = 2, ...", or "batch 1: K = 4, ahead 16, ..."."""
        tokens = self.num_speculative_tokens
        best = self.best_draft_length
        decided = f"batch {self.load}: K = {tokens}"
        if tokens and self.ahead_outcomes:
            decided += f", ahead {self.ahead_outcomes}"
        if not best:
            return f"{decided}, nothing was measured yet"
        compared = "" if tokens else f" with K = {best}"
        doubt = ""
        if tokens and self.gain < 1.0:
            doubt = ", which may not pay"
        elif not tokens and self.gain > 1.0:
            doubt = ", too little to be sure"
        parts = [f"{decided}, predicted {self.gain:.2f}x{compared}{doubt}"]
        if tokens < len(self.round_seconds):
            predicted = self.round_seconds[tokens]
            measured = self.measured_seconds / self.predicted_seconds if self.predicted_seconds else 0.0
            of_measured = f", {1e3 * predicted * measured:.1f} measured" if measured else ""
            parts.append(f"round {1e3 * predicted:.1f} ms predicted{of_measured}")
        if self.acceptance_rates:
            rates = "/".join(f"{rate:.0%}" for rate in self.acceptance_rates[:best])
            parts.append(f"acceptance {rates}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reason": self.reason}

"""How long a step of vLLM may wait for its proposals. Pure: no clock and no I/O.

The wait stops every sequence of the batch, so it must not take longer than what it saves: each accepted token spares a
step of vLLM. A wait of `accepted tokens x step time` gains nothing and loses nothing; that is the patience.
"""

from __future__ import annotations

from coordinator.stats.moving_average import MovingAverage

MAX_SECONDS = 0.5
"""Whatever was learnt: clients see no longer pause than this from a draft that hangs."""
MIN_SECONDS = 0.001
_FIRST_SECONDS = 0.05
"""Before the first step was timed."""
_FIRST_SHARE = 0.5
"""Share of proposed tokens that is taken to be accepted before any were."""
_OUTLIER = 4.0
"""A step of more than this many times the usual reads prompts, or waited for work; it counts as so many."""
_VAIN_STEPS = 3
"""After so many steps in a row without a single answer in time, no step waits for a while."""
_FIRST_PAUSE_STEPS = 8
_MAX_PAUSE_STEPS = 1024


class Patience:
    """The bound, and the steps that do not wait at all because the last waits were in vain."""

    def __init__(self, token_count: int, fixed_seconds: float | None = None) -> None:
        """Begin without any measurement.

        Args:
            token_count: Tokens of a proposal.
            fixed_seconds: A fixed bound; None: learn it.
        """
        self._fixed_seconds = fixed_seconds
        self._step = MovingAverage()
        self._accepted = MovingAverage()
        self._first_accepted = _FIRST_SHARE * token_count
        self._vain_steps = 0
        self._pause_steps = _FIRST_PAUSE_STEPS
        self._steps_left = 0

    @property
    def seconds(self) -> float:
        """How long the next step may wait."""
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        step = self._step.value
        if step is None:
            return _FIRST_SECONDS
        return min(max(self.accepted_tokens * step, MIN_SECONDS), MAX_SECONDS)

    @property
    def accepted_tokens(self) -> float:
        """Mean number of tokens that vLLM accepts of a proposal."""
        accepted = self._accepted.value
        return self._first_accepted if accepted is None else accepted

    @property
    def step_seconds(self) -> float | None:
        """Mean time of vLLM's own steps; None before the first."""
        return self._step.value

    def stepped(self, seconds: float) -> None:
        """Count a step of vLLM: from its proposals to the next ones."""
        usual = self._step.value
        self._step.add(seconds if usual is None else min(seconds, _OUTLIER * usual))

    def came_out(self, accepted: int) -> None:
        """Count a proposal that vLLM verified: its accepted tokens."""
        self._accepted.add(accepted)

    def may_ask(self) -> bool:
        """True if the step that begins may ask and wait."""
        if self._steps_left:
            self._steps_left -= 1
            return False
        return True

    def waited(self, *, in_vain: bool) -> None:
        """Count a wait; in vain: it ended at its bound and nothing had come."""
        if not in_vain:
            self._vain_steps, self._pause_steps = 0, _FIRST_PAUSE_STEPS
            return
        self._vain_steps += 1
        if self._vain_steps >= _VAIN_STEPS:
            self._steps_left = self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, _MAX_PAUSE_STEPS)

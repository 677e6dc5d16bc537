"""Models whose steps take a minimum time: real text and acceptance with the timing of another machine.

They sleep, so that two cores can simulate two devices. `tandem bench --pace VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.timing.sleeping import sleep as sleep_exactly
from tandem.engine.core.events import StepRecord
from tandem.telemetry.streams import OnStep


@dataclass(frozen=True, slots=True)
class Pace:
    """How long steps take."""

    verify_seconds: float
    """Milliseconds of a target step with one row."""
    draft_step_seconds: float
    """Milliseconds of a draft step with one row."""
    per_8_rows: float = 0.0
    """Share by which a step takes longer for each 8 tokens beyond the first."""

    @staticmethod
    def from_text(text: str) -> Pace:
        """The pace that a command line names.

        Raises:
            ValueError: it is not two or three numbers, the first two above 0 and the third not below.
        """
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or min(numbers[:2]) <= 0.0 or min(numbers) < 0.0:
            raise ValueError("must be VERIFY_MS,DRAFT_STEP_MS or VERIFY_MS,DRAFT_STEP_MS,PER_8_ROWS")
        return Pace(numbers[0] / 1e3, numbers[1] / 1e3, *numbers[2:])

    def seconds(self, role: str, tokens: int) -> float:
        """Minimum seconds of a step with so many tokens. Role: target or draft."""
        one = self.verify_seconds if role == "target" else self.draft_step_seconds
        return one * (1.0 + self.per_8_rows * (tokens - 1) / 8.0)

    def paced(
        self, role: str, on_step: OnStep = None, sleep: Callable[[float], None] = sleep_exactly
    ) -> Callable[[StepRecord], None]:
        """A step observer that sleeps before the results are delivered, so that steps take at least this long."""

        def wait(step: StepRecord) -> None:
            if on_step is not None:
                on_step(step)
            left = self.seconds(role, step.token_count) - step.seconds
            if left > 0.0:
                sleep(left)

        return wait

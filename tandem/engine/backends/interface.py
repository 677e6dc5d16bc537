"""The seam between the engine and what computes: a step backend runs steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from torch import Tensor

from tandem.engine.kv_cache.sequence import Segment


class StepBackend(Protocol):
    """One way to run a step.

    A backend finds the keys and values of a segment by itself; the engine passes only segments. The engine asks its
    backends in order, and the first that accepts a step runs it.
    """

    def accepts(self, segments: SequenceOf[Segment]) -> bool:
        """True if this backend can run a step of these segments, and runs it faster than those after it."""
        ...

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """Runs one step. The segments' keys and values are then in the KV cache.

        Args:
            segments: the accepted segments.
            rows: indices of the tokens whose logits are wanted, ascending, counted segment after segment.

        Returns:
            Logits, [len(rows), vocabulary_size] in the model's dtype or a wider one; valid until the next step.
        """
        ...

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """Steps for which the backend prepares something on first use, smallest first; each as the number of tokens of
        its sequences. Those of all but the first are few, as where one reads a prompt beside others that decode."""
        ...

    def prompt_tokens(self, limit: int) -> int:
        """The number of prompt tokens, up to `limit`, that a step should take for this backend to be fast."""
        ...

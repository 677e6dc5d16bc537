"""The seam between the engine and what computes: a step backend runs steps, a sampler chooses tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from torch import Tensor

from tandem.engine.kv_cache.sequence import Segment
from tandem.types import SamplingParams


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


class Sampler(Protocol):
    """Chooses tokens from logits. Every sampler draws the same noise bits; probabilities may differ in their last
    places, which changes about one sample in 10**13."""

    def probabilities(
        self, logits: Tensor, sampling: SequenceOf[SamplingParams], columns: Tensor | None = None
    ) -> Tensor:
        """The distribution of each row, float64 [R, V]; see `tandem.sampling.warping.warp`.

        Args:
            logits: [R, V], any floating type.
            sampling: of each row.
            columns: their `parameter_rows` on the device of the logits, so that the host need not wait for it.
        """
        ...

    def sample(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """One column per row, int64 [R]; see `tandem.sampling.noise.sample`.

        Args:
            probs: float64 [R, V].
            keys: int64 [R].
            token_ids: int64 [R, V], the id of each column; None when columns are ids.
        """
        ...

    def sample_tokens(self, probs: Tensor, keys: Tensor) -> Tensor:
        """The token that each row draws, int64 [R]; -1 where the row is no distribution, as `probabilities` makes of
        logits that are not finite. Does not wait for the device."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """The column of each row's highest logit, the first of equal ones, int64 [R]; -1 where the highest is not
        finite.

        Kernels skip NaN as long as a row has other numbers. Does not wait for the device.
        """
        ...

    def topk(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The highest logits of each row and their columns, [R, count] both, highest first."""
        ...

"""Choosing tokens from logits, on the kernels of a CPU where they are, and by torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.engine.native.calls import DTYPES
from tandem.engine.native.kernels import Kernels
from tandem.noise import race
from tandem.types import SamplingParams
from tandem.warping import warp


class Sampler:
    """`warp`, `race` and `topk` for one engine. Whichever way they are computed, the noise has the same bits; a
    probability may differ in its last places, which changes about one winner in 10**13."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        """With kernels for logits on the CPU, or without."""
        self._kernels = kernels

    def warped(self, logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
        """See `tandem.warping.warp`. The kernels know temperatures; truncation is left to torch."""
        if self._kernels is None or logits.dtype not in DTYPES or not all(map(_only_warms, sampling)):
            probs: Tensor = warp(logits, sampling)
            return probs
        return self._kernels.probabilities(logits, [params.temperature for params in sampling])

    def raced(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See `tandem.noise.race`, with each row's own ids where any are given."""
        if self._kernels is None:
            winners: Tensor = race(probs, keys, token_ids)
            return winners
        return self._kernels.race(probs, keys, token_ids)

    def best(self, logits: Tensor) -> Tensor:
        """The column of each row's highest logit, int64 [R]; the first of equal ones."""
        if self._kernels is None or logits.dtype not in DTYPES:
            return logits.argmax(dim=-1)
        return self._kernels.highest(logits, 1)[1][
            :, 0
        ]  # of 16 rows of 2,048 bfloat16 in 10 us; torch takes 116

    def highest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The highest logits of each row and their columns, [R, count] both, highest first."""
        if self._kernels is None or logits.dtype not in DTYPES:
            values, columns = logits.topk(count, dim=-1)
            return values, columns
        return self._kernels.highest(logits, count)


BY_TORCH = Sampler()
"""On any device, without kernels."""


def _only_warms(params: SamplingParams) -> bool:
    return not params.is_greedy and not params.truncates

"""Choosing tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.sampling.noise import sample
from tandem.sampling.warping import warp
from tandem.types import SamplingParams


class Sampler:
    """Chooses tokens with torch's own operations, on any device.

    A subclass may compute otherwise. It draws the same noise bits; its probabilities may differ in their last places,
    which changes about one sample in 10**13.
    """

    def probabilities(
        self, logits: Tensor, sampling: Sequence[SamplingParams], columns: Tensor | None = None
    ) -> Tensor:
        """The distribution of each row, float64 [R, V]; see `tandem.sampling.warping.warp`.

        Args:
            columns: their `parameter_rows` on the device of the logits, so that the host need not wait for it.
        """
        probs: Tensor = warp(logits, sampling, columns)
        return probs

    def sample(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """One column per row of float64 probs [R, V], int64 [R]; see `tandem.sampling.noise.sample`.

        `token_ids` [R, V] are the ids of the columns; None when columns are ids.
        """
        winners: Tensor = sample(probs, keys, token_ids)
        return winners

    def sample_tokens(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The column that each row draws, int64 [R]; -1 where the row is no distribution, as `probabilities` makes of
        logits that are not finite. Does not wait for the device.

        `token_ids` [V] are the ids of the columns; None when columns are ids.
        """
        ids = None if token_ids is None else token_ids.repeat(len(probs), 1)
        columns = self.sample(probs, keys, ids)[:, None]
        # A row that is no distribution holds only NaN or zeros, so any winner shows it.
        return torch.where(probs.gather(1, columns) > 0.0, columns, -1)[:, 0]

    def argmax(self, logits: Tensor) -> Tensor:
        """The column of each row's highest logit, the first of equal ones, int64 [R]; -1 where the highest is not
        finite.

        Kernels skip NaN as long as a row has other numbers. Does not wait for the device.
        """
        columns = logits.argmax(dim=-1, keepdim=True)  # of a NaN, where there is one
        is_finite = logits.gather(1, columns).isfinite()
        return torch.where(is_finite, columns, -1)[:, 0]

    def topk(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The highest logits of each row and their columns, [R, count] both, highest first."""
        values, columns = logits.topk(count, dim=-1)
        return values, columns


TORCH_SAMPLER = Sampler()

"""Choosing tokens from logits with torch's own operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.sampling.noise import sample
from tandem.sampling.warping import warp
from tandem.types import SamplingParams


class TorchSampler:
    """See `tandem.engine.backends.interface.Sampler`."""

    def probabilities(
        self, logits: Tensor, sampling: Sequence[SamplingParams], columns: Tensor | None = None
    ) -> Tensor:
        """See `Sampler`."""
        probs: Tensor = warp(logits, sampling, columns)
        return probs

    def sample(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See `Sampler`."""
        winners: Tensor = sample(probs, keys, token_ids)
        return winners

    def sample_tokens(self, probs: Tensor, keys: Tensor) -> Tensor:
        """See `Sampler`."""
        columns = self.sample(probs, keys)[:, None]
        # A row that is no distribution holds only NaN or zeros, so any winner shows it.
        return torch.where(probs.gather(1, columns) > 0.0, columns, -1)[:, 0]

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Sampler`."""
        columns = logits.argmax(dim=-1, keepdim=True)  # of a NaN, where there is one
        is_finite = logits.gather(1, columns).isfinite()
        return torch.where(is_finite, columns, -1)[:, 0]

    def topk(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Sampler`."""
        values, columns = logits.topk(count, dim=-1)
        return values, columns


TORCH_SAMPLER = TorchSampler()

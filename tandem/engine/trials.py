"""What a recording is tried on before it is trusted: sequences of any tokens with any past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.engine.buckets import Bucket
from tandem.engine.cache import KvArena
from tandem.engine.extents import Extent, granules
from tandem.engine.segment import Segment
from tandem.engine.sequence import Sequence

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""By how much of the largest logit a recording may differ from the plain step: they add up in other orders."""

_PAST_TOKENS = 24
"""Keys that the comparison gives each sequence to look back on."""


@contextmanager
def trial(
    bucket: Bucket, arena: KvArena, vocabulary_size: int, tokens_ahead: int = 0
) -> Iterator[list[Segment]]:
    """Segments as wide as the bucket's, as many as it and the arena hold; afterwards the arena is empty again.

    Args:
        bucket: Of the recording.
        arena: Must be empty.
        vocabulary_size: The tokens are below.
        tokens_ahead: For how many more tokens each sequence is to have room, in the bucket too.
    """
    past = min(_PAST_TOKENS, bucket.length - bucket.width - tokens_ahead)
    capacity = granules(past + bucket.width + tokens_ahead)
    count = min(bucket.sequences, arena.total_tokens // capacity)
    generator = torch.Generator().manual_seed(0)
    for layer in arena.layers:
        for storage in (layer.keys, layer.values):
            part = storage[:, :, : count * capacity]
            part.copy_(torch.randn(part.shape, generator=generator))
    segments = []
    for i in range(count):
        sequence = Sequence(Extent(i * capacity, capacity), capacity, vocabulary_size)
        sequence.token_ids = [(7 * i + 3 * j) % vocabulary_size for j in range(past + bucket.width)]
        sequence.advance(past)
        segments.append(Segment(sequence, bucket.width))
    try:
        yield segments
    finally:
        arena.zero(0, count * capacity)

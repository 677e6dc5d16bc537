"""Packed token streams and the windows that training reads from them."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.demo.recipe.architecture import END_OF_TEXT_ID
from models.demo.recipe.corpus import SourceFile


def packed(files: Iterable[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All files in one row of token ids, an end-of-text token after each."""
    rows = tokenizer([file.text for file in files], verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in (*row, END_OF_TEXT_ID)], dtype=torch.int32)


class Windows:
    """Draws batches of consecutive tokens; every part of the stream is read once before any is read again."""

    def __init__(self, stream: Tensor, seed: int) -> None:
        self._stream = stream
        self._generator = torch.Generator().manual_seed(seed)
        self._length = 0
        self._starts: list[int] = []

    def next_batch(self, rows: int, length: int) -> Tensor:
        """A [rows, length + 1] batch: inputs and, one position on, their labels."""
        if length != self._length:
            self._length, self._starts = length, []
        if len(self._starts) < rows:
            self._starts += self._shuffled_starts()
        starts, self._starts = self._starts[:rows], self._starts[rows:]
        return torch.stack([self._stream[start : start + length + 1] for start in starts]).long()

    def _shuffled_starts(self) -> list[int]:
        # Each pass is cut at another offset, so no two passes see the same windows.
        offset = int(torch.randint(self._length, (1,), generator=self._generator))
        count = (len(self._stream) - 1 - offset) // self._length
        order = torch.randperm(count, generator=self._generator)
        return [int(start) for start in offset + order * self._length]

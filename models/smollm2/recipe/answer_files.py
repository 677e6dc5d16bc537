"""The files of states that `answers` leaves, as batches for training."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.demo.recipe.heads.eagle3 import STEPS, HeadLessons

ANSWER_MARK = (1, 520, 9531, 198)
"""Token ids of `<|im_start|>assistant` and the end of its line: what follows is the model's own."""
END_OF_ANSWER = 2
"""Token id of `<|im_end|>`. It is in no file: the target does not read what it ends with."""


@dataclass(frozen=True)
class Batch:
    """Answers of different lengths, padded on the right; `mask` [rows, length] is true where the target's last state
    foresees a token of an answer."""

    lessons: HeadLessons
    mask: Tensor


def answer_start(tokens: Sequence[int]) -> int:
    """Index of the first token after the prompt.

    Raises:
        ValueError: the text is no chat.
    """
    size = len(ANSWER_MARK)
    for start in range(len(tokens) - size, -1, -1):
        if tuple(tokens[start : start + size]) == ANSWER_MARK:
            return start + size
    raise ValueError("the text has no line that opens an answer")


def read_batch(paths: Sequence[Path]) -> Batch:
    """Answers of these files."""
    files = [load_file(path) for path in paths]
    tokens = [_padded(file["token_ids"]) for file in files]
    states = pad_sequence([_padded(file["hidden_states"]) for file in files], batch_first=True)
    masks = [_foresees_answer(file["token_ids"]) for file in files]
    lessons = HeadLessons(
        pad_sequence(tokens, batch_first=True), states[:, :, :-1].permute(2, 0, 1, 3), states[:, :, -1]
    )
    return Batch(lessons, pad_sequence(masks, batch_first=True))


def _padded(values: Tensor) -> Tensor:
    """With room for one proposal behind the text."""
    return torch.cat((values, values.new_zeros(STEPS + 1, *values.shape[1:])))


def _foresees_answer(tokens: Tensor) -> Tensor:
    places = torch.arange(len(tokens) + STEPS + 1)
    return (places >= answer_start(tokens.tolist()) - 1) & (places < len(tokens))


def endless_batches(folder: Path, rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """Batches for ever. Each pass takes every file once that is there when it begins.

    Raises:
        ValueError: there are not enough files for one batch.
    """
    while True:
        paths = sorted(folder.glob("*.safetensors"))
        if len(paths) < rows:
            raise ValueError(f"the folder {folder} has {len(paths)} answers; it must have {rows} or more")
        order = torch.randperm(len(paths), generator=generator).tolist()
        for start in range(0, len(order) - rows + 1, rows):
            yield read_batch([paths[index] for index in order[start : start + rows]])


def frequent_tokens(folder: Path, count: int) -> list[int]:
    """The token ids that occur most often in the answers, in ascending order."""
    found: Counter[int] = Counter()
    for path in folder.glob("*.safetensors"):
        tokens = load_file(path)["token_ids"].tolist()
        found.update([*tokens[answer_start(tokens) :], END_OF_ANSWER])
    ids = [token for token, _ in found.most_common(count)]
    # A small folder may not have as many: the lowest ids are the shortest pieces of text.
    spare = (token for token in range(10 * count) if token not in found)
    return sorted([*ids, *(next(spare) for _ in range(count - len(ids)))])

"""Reads a head's tensors, each with the name and the shape that its config implies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.models.shards import StoredTensor, stored_tensors
from tandem.engine.models.weight_files import find_weights
from tandem.errors import ModelFolderError


class HeadTensors:
    """The tensors of a head's folder. Their names are read without the prefixes that some exporters add."""

    def __init__(self, folder: Path, renamed: Mapping[str, str]) -> None:
        """
        Args:
            folder: where the checkpoint is.
            renamed: prefixes of names, and what the head's module calls them.

        Raises:
            ModelFolderError: there are no weights, or a file is damaged.
        """
        self._folder = folder
        self._stored: dict[str, StoredTensor] = {}
        self._written: dict[str, str] = {}
        """Each name as the file spells it."""
        for name, tensor in stored_tensors(find_weights(folder).files, torch.device("cpu")).items():
            known = _renamed(name, renamed)
            self._stored[known], self._written[known] = tensor, name

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def rows(self, name: str) -> int | None:
        """First number of a tensor's shape; None where there is no such tensor."""
        return self._stored[name].to().shape[0] if name in self._stored else None

    def read(self, name: str, shape: tuple[int, ...], reason: str) -> Tensor:
        """A tensor as it is stored.

        Args:
            name: what the head's module calls it.
            shape: the shape that it must have.
            reason: where the shape comes from, for the sentence.

        Raises:
            ModelFolderError: it is missing or has another shape.
        """
        if name not in self._stored:
            raise ModelFolderError(
                f"the drafting head in {self._folder} has no tensor {name}; it must have one of shape "
                f"{list(shape)} ({reason})"
            )
        tensor = self._stored[name].to()
        if tuple(tensor.shape) != shape:
            raise ModelFolderError(
                f"the tensor {self._written[name]} of the drafting head in {self._folder} has the shape "
                f"{list(tensor.shape)}; it must have {list(shape)} ({reason})"
            )
        return tensor


def read_target_ids(tensors: HeadTensors, folder: Path, draft_size: int, vocabulary_size: int) -> Tensor:
    """The target's id of each id of a reduced vocabulary, int64 [draft_size]. `d2t` holds offsets: the target's id is
    the draft's own plus the offset.

    Args:
        tensors: the head's.
        folder: where it is, for the sentence.
        draft_size: tokens that the head can say.
        vocabulary_size: the target's tokens.

    Raises:
        ModelFolderError: `d2t` is missing, or the ids are not distinct ones of the target.
    """
    ids = torch.arange(draft_size) + tensors.read("d2t", (draft_size,), "draft_vocab_size").long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size or len(set(ids.tolist())) < len(ids):
        raise ModelFolderError(
            f"the tensor d2t of the drafting head in {folder} leads to ids from {int(ids.min())} to {int(ids.max())}; "
            f"it must hold offsets that lead to distinct ids in 0..{vocabulary_size - 1}"
        )
    return ids


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for prefix, known in renamed.items():
        if name.startswith(prefix):
            return _renamed(known + name.removeprefix(prefix), renamed)
    return name

"""Facts about its target that every drafting head needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.engine.models.loading import LoadedModel
from tandem.errors import ModelFolderError


def text_config(target: LoadedModel) -> Any:
    """The target's config, that of its language model where it has several."""
    module: Any = target.module
    return module.config.get_text_config(decoder=True)


def check_same(folder: Path, key: str, own: int | None, others: int, target: LoadedModel) -> None:
    """Refuse a head that was made for another target.

    Args:
        folder: the head's.
        key: of the number in its config.json.
        own: the head's number; None if it has none.
        others: the target's.
        target: the model, for the sentence.

    Raises:
        ModelFolderError: the numbers differ.
    """
    if own != others:
        raise ModelFolderError(
            f"the drafting head in {folder} was made for another target: its {key} is {own}, and that of "
            f"{target.info.name} is {others}"
        )

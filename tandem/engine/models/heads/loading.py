"""Loads a drafting head of any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tandem.config.names import DFLASH, EAGLE, EAGLE3, MEDUSA, MTP
from tandem.engine.models.heads.dflash import load_dflash, read_dflash_config
from tandem.engine.models.heads.eagle import load_eagle, read_eagle_config
from tandem.engine.models.heads.eagle3 import load_eagle3, read_eagle3_config
from tandem.engine.models.heads.interface import DraftHead
from tandem.engine.models.heads.medusa import load_medusa, read_medusa_config
from tandem.engine.models.heads.mtp import load_mtp, read_mtp_config
from tandem.engine.models.loading import LoadedModel

_METHODS: Mapping[str, tuple[Callable[[Path], Any], Callable[[Any, LoadedModel], DraftHead]]] = {
    EAGLE3: (read_eagle3_config, load_eagle3),
    EAGLE: (read_eagle_config, load_eagle),
    MEDUSA: (read_medusa_config, load_medusa),
    MTP: (read_mtp_config, load_mtp),
    DFLASH: (read_dflash_config, load_dflash),
}
"""What reads a method's config, and what makes a head of it."""


def head_loader(folder: Path, method: str) -> Callable[[LoadedModel], DraftHead]:
    """Read a head's config, and return what loads the head for its target, in the target's dtype and on its device.

    Args:
        folder: the checkpoint; the target's own for `mtp`.
        method: one of `tandem.config.names.BOUND_METHODS`.

    Raises:
        ModelFolderError: there is no config, its format is unknown, or a number in it is missing or wrong. The loader
            raises it where a tensor is missing or has another shape than the config says, or the head belongs to
            another target.
    """
    read_config, load = _METHODS[method]
    return partial(load, read_config(folder))

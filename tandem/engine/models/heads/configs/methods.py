"""Reads a drafting head's config by its method. Needs no torch; `loading` has the module of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tandem.config.names import DFLASH, EAGLE, EAGLE3, MEDUSA, MTP
from tandem.engine.models.heads.configs.dflash import DFlashConfig, read_dflash_config
from tandem.engine.models.heads.configs.eagle import EagleConfig, read_eagle_config
from tandem.engine.models.heads.configs.eagle3 import HeadConfig, read_head_config
from tandem.engine.models.heads.configs.medusa import MedusaConfig, read_medusa_config
from tandem.engine.models.heads.configs.mtp import MtpConfig, read_mtp_config

AnyHeadConfig = HeadConfig | EagleConfig | MedusaConfig | MtpConfig | DFlashConfig
"""The config of some drafting head."""

_READERS: Mapping[str, Callable[[Path], AnyHeadConfig]] = {
    EAGLE3: read_head_config,
    EAGLE: read_eagle_config,
    MEDUSA: read_medusa_config,
    MTP: read_mtp_config,
    DFLASH: read_dflash_config,
}


def read_config(folder: Path, method: str) -> AnyHeadConfig:
    """The config of a drafting head.

    Args:
        folder: the checkpoint; the target's own for `mtp`.
        method: one of `tandem.config.names.BOUND_METHODS`.

    Raises:
        ModelFolderError: there is none, its format is unknown, or a number in it is missing or wrong.
    """
    return _READERS[method](folder)

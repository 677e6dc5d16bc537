"""Loads a drafting head of any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tandem.config.names import DFLASH, EAGLE, EAGLE3, MEDUSA, MTP
from tandem.engine.models.heads.dflash import DFlashConfig, load_dflash, read_dflash_config
from tandem.engine.models.heads.eagle import EagleConfig, load_eagle, read_eagle_config
from tandem.engine.models.heads.eagle3 import HeadConfig, load_eagle3, read_head_config
from tandem.engine.models.heads.interface import DraftHead
from tandem.engine.models.heads.medusa import MedusaConfig, load_medusa, read_medusa_config
from tandem.engine.models.heads.mtp import MtpConfig, load_mtp, read_mtp_config
from tandem.engine.models.loading import LoadedModel


def load_head(config: AnyHeadConfig, target: LoadedModel) -> DraftHead:
    """A head, in the target's dtype and on its device.

    Raises:
        ModelFolderError: a tensor is missing or has another shape than the config says, or the head belongs to another
            target.
    """
    if isinstance(config, HeadConfig):
        return load_eagle3(config, target)
    if isinstance(config, EagleConfig):
        return load_eagle(config, target)
    if isinstance(config, MedusaConfig):
        return load_medusa(config, target)
    if isinstance(config, MtpConfig):
        return load_mtp(config, target)
    return load_dflash(config, target)


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

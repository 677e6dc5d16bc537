"""Loads a drafting head of any method."""

from __future__ import annotations

from tandem.engine.models.heads.configs.eagle import EagleConfig
from tandem.engine.models.heads.configs.eagle3 import HeadConfig
from tandem.engine.models.heads.configs.medusa import MedusaConfig
from tandem.engine.models.heads.configs.methods import AnyHeadConfig
from tandem.engine.models.heads.configs.mtp import MtpConfig
from tandem.engine.models.heads.dflash import load_dflash
from tandem.engine.models.heads.eagle import load_eagle
from tandem.engine.models.heads.eagle3 import load_eagle3
from tandem.engine.models.heads.interface import DraftHead
from tandem.engine.models.heads.medusa import load_medusa
from tandem.engine.models.heads.mtp import load_mtp
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

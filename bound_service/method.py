"""The drafting method of a head beside its target."""

from __future__ import annotations

from pathlib import Path

from tandem.config.names import BOUND_METHODS, MTP, OWN_METHODS, canonical_method, checkpoint_method
from tandem.errors import ConfigurationError
from target_service.settings import TargetSettings


def head_folder(settings: TargetSettings) -> Path | None:
    """Where the head is; None if the target's own checkpoint has it.

    Raises:
        ConfigurationError: the settings name no folder, or one where none belongs.
    """
    folder = settings.draft_model
    if canonical_method(settings.speculative_method or "") in OWN_METHODS:
        if folder is not None:
            raise ConfigurationError(
                f"--method is {settings.speculative_method}, whose weights lie in the target's own checkpoint, and "
                f"--draft-model is {folder}; leave out --draft-model"
            )
        return None
    if folder is None:
        raise ConfigurationError(
            "--draft-model is missing; give the folder of a drafting head for this model"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"--draft-model is {folder}; there is no such folder")
    return folder


def head_method(settings: TargetSettings, folder: Path | None) -> str:
    """The method that the settings name, or else the one that the head's checkpoint implies.

    Args:
        settings: The target's.
        folder: What `head_folder` found.

    Raises:
        ConfigurationError: it is none of those that read a target's hidden states.
    """
    given = settings.speculative_method
    if folder is None:
        return canonical_method(given or MTP)
    found = checkpoint_method(folder)
    method = found if given is None else canonical_method(given)
    hosted = [each for each in BOUND_METHODS if each not in OWN_METHODS]
    if method not in hosted:
        raise ConfigurationError(
            f"--method is {given or found or 'not given'} for the draft {folder}; beside a target it must be "
            f"{' or '.join(hosted)}"
        )
    return method

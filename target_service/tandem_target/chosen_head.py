"""Chooses the drafting head beside a target, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from tandem.config.names import BOUND_METHODS, OWN_METHODS, canonical_method, checkpoint_method
from tandem.errors import ConfigurationError
from tandem_target.settings import TargetSettings


def chosen_head(settings: TargetSettings) -> tuple[str, Path | None]:
    """Return the drafting method and the head's folder; None if the target's own checkpoint has the head."""
    given = settings.speculative_method
    folder = settings.draft_model
    if (method := canonical_method(given or "")) in OWN_METHODS:
        if folder is not None:
            raise ConfigurationError(
                f"--method is {given}, whose weights lie in the target's own checkpoint, and --draft-model is "
                f"{folder}; leave out --draft-model"
            )
        return method, None
    if folder is None:
        raise ConfigurationError(
            "--draft-model is missing; give the folder of a drafting head for this model"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"--draft-model is {folder}; there is no such folder")
    method = method or checkpoint_method(folder)
    hosted = [each for each in BOUND_METHODS if each not in OWN_METHODS]
    if method not in hosted:
        raise ConfigurationError(
            f"--method is {given or method or 'not given'} for the draft {folder}; beside a target it must be "
            f"{' or '.join(hosted)}"
        )
    return method, folder

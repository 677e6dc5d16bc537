"""From the name that a user gives a model to the folder that holds its checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from tandem.errors import ModelFolderError
from tandem.model_sources import hub, smollm2
from tandem.model_sources.names import SMOLLM2

logger = logging.getLogger(__name__)


def find_model(reference: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model, and fetch or convert the model first if necessary.

    Args:
        reference: A folder, the name ``smollm2``, or a Hugging Face id such as
            ``HuggingFaceTB/SmolLM2-135M-Instruct``. A folder of that name comes first.
        revision: Branch, tag or commit of a Hugging Face id; None is the hub's main branch.

    Raises:
        ModelFolderError: there is no model of that name. A folder that does not exist is returned unchanged, so that
            opening it raises a better error.
        ServiceUnavailableError: the hub does not answer, and the model is not in the cache.
    """
    path = Path(reference)
    if not path.exists():
        if str(reference) == SMOLLM2:
            _refuse_revision(reference, revision)
            return smollm2.folder()
        if hub.is_model_id(reference):
            return hub.fetch(str(reference), revision)
    _refuse_revision(reference, revision)
    return path


def _refuse_revision(reference: str | Path, revision: str | None) -> None:
    if revision is not None:
        raise ModelFolderError(
            f"revision is {revision}, but the model {reference} is no Hugging Face id; leave out revision"
        )

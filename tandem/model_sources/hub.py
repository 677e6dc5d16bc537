"""Models of a Hugging Face hub, fetched with `huggingface_hub` into the cache that all its users share."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from contextlib import suppress
from pathlib import Path

from tandem.errors import ModelFolderError, ServiceUnavailableError, TandemError

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Configuration, tokenizer and safetensors at the top of the repository: no pickled weights, and no code.
_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# Folders hold other exports of the same model; consolidated files hold the same weights once more.
_OTHER_EXPORTS = ("*/*", "consolidated*")


def is_model_id(reference: str | Path) -> bool:
    """True if a name that is not a folder has the form owner/name of a hub id.

    A path whose first part is an existing folder is meant as a path: `models/tagret` must not be looked up elsewhere.
    """
    text = str(reference)
    return _ID.fullmatch(text) is not None and not Path(text).parent.exists()


def fetch(model_id: str, revision: str | None = None) -> Path:
    """Fetch the model's files that are missing in the cache, and return the folder of that revision.

    `HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` have the same effect as for every user of
    `huggingface_hub`.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelFolderError(
            f"the model {model_id} is not a folder here, and fetching it as a Hugging Face id needs huggingface_hub; "
            "install it: pip install 'tandem-speculative[hub]'"
        )
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    logger.info("fetching model", extra={"model": model_id, "revision": revision or "main"})
    try:
        folder = huggingface_hub.snapshot_download(
            model_id, revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_OTHER_EXPORTS)
        )
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        raise _explain(error, model_id, revision) from error
    return Path(str(folder))


def fetch_config(model_id: str) -> Path:
    """Fetch a model's config.json alone, and return its folder; one without it where the hub does not send it: fetching
    the whole model says why."""
    if importlib.util.find_spec("huggingface_hub") is not None:
        import huggingface_hub

        with suppress(Exception):  # see `fetch`
            return Path(huggingface_hub.hf_hub_download(model_id, "config.json")).parent
    return Path(model_id)


def model_name(folder: Path) -> str:
    """Display name of a model: its id for a folder of the hub's cache, else the folder's name.

    In that cache the folder of a model is models--OWNER--NAME/snapshots/COMMIT.
    """
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name


def _explain(error: Exception, model_id: str, revision: str | None) -> TandemError:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        return ServiceUnavailableError(
            f"the hub cannot be reached (or HF_HUB_OFFLINE is set) and the cache does not hold {model_id}; "
            "fetch it once while online, or name a folder"
        )
    faults = {
        errors.GatedRepoError: "is gated: accept its conditions on its page at the hub, then set HF_TOKEN to a token "
        "of that account",
        errors.RepositoryNotFoundError: "is neither a folder here nor a model that the hub shows you; check the name, "
        "and for a private model set HF_TOKEN",
        errors.RevisionNotFoundError: f"has no revision {revision}; it must be a branch, a tag or a commit of it",
        errors.HFValidationError: "is neither a folder here nor a valid Hugging Face id",
    }  # a gated repository's error is one of a repository that was not found as well
    for kind, fault in faults.items():
        if isinstance(error, kind):
            return ModelFolderError(f"the model {model_id} {fault}")
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ServiceUnavailableError(f"the hub did not send {model_id}: {reason}")

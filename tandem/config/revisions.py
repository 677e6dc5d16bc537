"""Which revision of a model on a hub is meant."""

from __future__ import annotations

from tandem.config.options import Options


class RevisionOptions(Options):
    """Which revision of a model on a hub is meant."""

    revision: str | None = None
    """Branch, tag or commit, when the model is named by a Hugging Face id. By default the hub's main branch. vLLM's
    name."""
    code_revision: str | None = None
    """Revision of the code that comes with a model. It has no effect, since Tandem never runs such code. vLLM's
    name."""

"""Prompt lookup as a drafting method (`tandem.drafting.ngram`)."""

from __future__ import annotations

from tandem.drafting.ngram import NgramIndex
from tandem_draft.proposers.model_free import ModelFreeProposer
from tandem_draft.settings import DraftSettings


def ngram_proposer(settings: DraftSettings) -> ModelFreeProposer:
    """Draft by prompt lookup."""
    return ModelFreeProposer("ngram", lambda tokens, _: NgramIndex(tokens, settings), settings)

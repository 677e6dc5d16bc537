"""What all replicas must have in common: the models that the first of them were met with."""

from __future__ import annotations

from dataclasses import fields

from coordinator.bounds import MOST_SPECULATIVE_TOKENS
from coordinator.replica import Role
from coordinator.rules import Deployment, check_models
from tandem.channels import DEFAULT_MESSAGE_LIMIT_BYTES, message_limit
from tandem.config import SpeculativeConfig
from tandem.config.acceptance import MOST_CONFIGURED_TOKENS
from tandem.errors import IncompatibleModelsError
from tandem.types import ModelInfo

MOST_ROWS = max(MOST_SPECULATIVE_TOKENS, MOST_CONFIGURED_TOKENS) + 1
"""Most rows that one answer may hold, for the limit on a message's size: one for each token of a proposal, however long
configuration and requests may ask for it, and one after it."""

# A replica of another release may serve the same model.
_MAY_DIFFER = frozenset({"service_version"})


class Fleet:
    """The target that every replica of it must be, and the draft that says what kind all drafts are of.

    A stream moves from one target to another between two tokens, so they must be the same model, computed alike. Drafts
    may be different models as long as each goes with the target: what they propose is verified.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.target: ModelInfo | None = None
        """The first target that was met."""
        self.draft: ModelInfo | None = None
        """The first draft that was met and goes with it."""

    @property
    def message_limit_bytes(self) -> int:
        """Most bytes that a service's message may have."""
        if self.target is None:
            return DEFAULT_MESSAGE_LIMIT_BYTES
        return message_limit(self.target.vocabulary_size, MOST_ROWS)

    def judge(self, role: Role, info: ModelInfo) -> str:
        """Why a replica with this model cannot join; empty when it can. The first of its role sets the measure."""
        return self._judge_target(info) if role is Role.TARGET else self._judge_draft(info)

    def _judge_target(self, info: ModelInfo) -> str:
        if self.target is None:
            self.target = info
        return "; ".join(_differences(info, self.target))

    def _judge_draft(self, info: ModelInfo) -> str:
        assert self.target is not None, "drafts are met once there is a target"
        try:
            check_models(Deployment(self._config, self.target, info))
        except IncompatibleModelsError as error:
            return str(error)
        if self.draft is None:
            self.draft = info
        if info.has_model != self.draft.has_model:
            return (
                f"the draft {info.name} drafts {_how(info)} and the other drafts {_how(self.draft)}; "
                "they must draft alike: what a request may ask for depends on it"
            )
        return ""


def _how(draft: ModelInfo) -> str:
    return "with a model" if draft.has_model else "without a model"


def _differences(info: ModelInfo, reference: ModelInfo) -> list[str]:
    return [
        f"{field.name} is {_shown(info, field.name)} for this target and {_shown(reference, field.name)} for the "
        "others; all targets must serve one model alike"
        for field in fields(ModelInfo)
        if field.name not in _MAY_DIFFER and getattr(info, field.name) != getattr(reference, field.name)
    ]


def _shown(info: ModelInfo, name: str) -> str:
    value = getattr(info, name)
    return value[:12] if name == "tokenizer_hash" else str(value)

"""The models that all replicas must agree on: those of the first replicas that were reached."""

from __future__ import annotations

from dataclasses import fields

from coordinator.replicas.compatibility import Deployment, check_models
from coordinator.settings.coordinator import MAX_SPECULATIVE_TOKENS
from tandem.config import SpeculativeConfig
from tandem.config.speculative import MAX_CONFIGURED_TOKENS
from tandem.errors import IncompatibleModelsError
from tandem.replica import Role
from tandem.rpc.channels import DEFAULT_MESSAGE_LIMIT_BYTES, message_limit
from tandem.types import ModelInfo

MAX_ROWS = max(MAX_SPECULATIVE_TOKENS, MAX_CONFIGURED_TOKENS) + 1
"""Maximum rows of one answer, for the limit on a message's size: one for each token of the longest proposal that
configuration and requests may ask for, and one after it."""

# A replica of another release may serve the same model, and only some targets may host a draft.
_MAY_DIFFER = frozenset({"service_version", "features", "drafting_method"})


class Fleet:
    """The model that all targets must serve, and the kind of draft that all drafts must be.

    A stream moves from one target to another between two tokens, so all targets must compute the same model alike.
    Drafts may be different models as long as each fits the target, which verifies their proposals.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.target: ModelInfo | None = None
        """The first target that was reached."""
        self.draft: ModelInfo | None = None
        """The first draft that was reached and fits it."""

    @property
    def message_limit_bytes(self) -> int:
        """Maximum bytes of a service's message."""
        if self.target is None:
            return DEFAULT_MESSAGE_LIMIT_BYTES
        return message_limit(self.target.vocabulary_size, MAX_ROWS)

    def judge(self, role: Role, info: ModelInfo) -> str:
        """Reason why a replica with this model cannot join; empty when it can. The first replica of a role sets the
        standard."""
        return self._judge_target(info) if role is Role.TARGET else self._judge_draft(info)

    def _judge_target(self, info: ModelInfo) -> str:
        if self.target is None:
            self.target = info
        return "; ".join(_differences(info, self.target))

    def _judge_draft(self, info: ModelInfo) -> str:
        assert self.target is not None, "drafts are reached after the first target"
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

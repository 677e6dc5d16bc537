"""Rules that the models of drafts and targets keep to work together, and what all replicas must agree on.

docs/configuration.md lists the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from tandem.config import SpeculativeConfig
from tandem.config.names import STANDALONE
from tandem.config.rule import Rule, broken, rule
from tandem.config.speculative import MAX_CONFIGURED_TOKENS
from tandem.errors import IncompatibleModelsError
from tandem.model.types import Coverage, ModelInfo, SamplingDefaults, Weights
from tandem.rpc.channels import DEFAULT_MESSAGE_LIMIT_BYTES, message_limit
from tandem_coordinator.settings.coordinator import MAX_SPECULATIVE_TOKENS
from tandem_coordinator.settings.sampling import VLLM, SamplingOptions, SamplingPolicy


@dataclass(frozen=True, slots=True)
class Deployment:
    """The models that should work together, and the configuration."""

    config: SpeculativeConfig
    target: ModelInfo
    draft: ModelInfo | None = None
    """None when the target works alone."""

    @property
    def draft_model(self) -> ModelInfo | None:
        return self.draft if self.draft is not None and self.draft.has_model else None


def check_models(deployment: Deployment) -> None:
    """Refuse models that do not fit each other or the configuration."""
    if sentences := broken(MODEL_RULES, deployment):
        raise IncompatibleModelsError("; ".join(sentences))


@rule("`speculative_method`, when set, is what the draft service drafts by.")
def _drafting_method(deployment: Deployment) -> Iterator[str]:
    method = deployment.config.speculative_method
    draft = deployment.draft
    if method is None:
        return
    if draft is None:
        yield f"speculative_method is {method}; it needs a draft service: name it with draft_address"
        return
    # A service that drafts without a model has the method for its architecture.
    served = draft.drafting_method or (STANDALONE if draft.has_model else draft.architecture)
    if served != method:
        yield f"speculative_method is {method}; the draft service drafts by {served}: they must be the same"


MIN_TEXT_SHARE = 0.25
"""Share of a draft's text that token-level intersection must keep (`Coverage.text_share`). With less, the draft can
hardly say what it would."""


def needs_mapping(draft: ModelInfo, target: ModelInfo) -> bool:
    """True if the draft's ids do not all mean the same to the target.

    A model may have more rows than its tokenizer has ids, and their number may differ from model to model: a draft
    proposes no id that the target lacks.
    """
    return draft.has_model and draft.tokenizer_hash != target.tokenizer_hash


def _obstacles(deployment: Deployment) -> Iterator[str]:
    """The reason why the draft cannot draft for a target with other ids, if it cannot."""
    if deployment.config.vocabulary_mapping == "off":
        yield "vocabulary_mapping is off"
    elif deployment.draft is not None and not deployment.draft.maps_vocabularies:
        yield "this draft cannot map vocabularies, for which it needs its tokenizer.json and one device"


@rule("The draft model has as many ids as a target that names no tokenizer.")
def _vocabulary_size(deployment: Deployment) -> Iterator[str]:
    draft = deployment.draft_model
    target = deployment.target
    if draft is None or draft.vocabulary_size == target.vocabulary_size or target.tokenizer_hash:
        return
    yield (
        f"the draft {draft.name} has a vocabulary of {draft.vocabulary_size} tokens and the target {target.name} "
        f"one of {target.vocabulary_size}; they must be equal, since the target names no tokenizer by which ids could "
        "be mapped"
    )


@rule(
    "Draft model and target have one tokenizer, or `vocabulary_mapping` is not `off` and the draft can map."
)
def _tokenizer(deployment: Deployment) -> Iterator[str]:
    draft = deployment.draft_model
    target = deployment.target
    if draft is None or draft.tokenizer_hash == target.tokenizer_hash:
        return
    for obstacle in _obstacles(deployment):
        yield (
            f"the draft {draft.name} has another tokenizer (hash {draft.tokenizer_hash[:12]}) than the target "
            f"{target.name} (hash {target.tokenizer_hash[:12]}); they must be the same, since {obstacle}"
        )


def check_coverage(config: SpeculativeConfig, draft: ModelInfo, coverage: Coverage) -> None:
    """Refuse a mapping that keeps too little of the draft."""
    if coverage.text_share < MIN_TEXT_SHARE and config.vocabulary_mapping != "slem":
        raise IncompatibleModelsError(
            f"the target has {coverage.text_share:.0%} of the tokens that the draft {draft.name} writes; it must have "
            f"{MIN_TEXT_SHARE:.0%}, or vocabulary_mapping must be slem, which needs none"
        )


@rule("A draft that reads hidden states needs a target that sends those of its head.")
def _hidden_states(deployment: Deployment) -> Iterator[str]:
    draft = deployment.draft
    if draft is not None and draft.features_head not in ("", deployment.target.features_head):
        sent = deployment.target.features_head[:12] or "none"
        yield (
            f"the draft {draft.name} is the head {draft.features_head[:12]} and reads hidden states; the target sends "
            f"those of the head {sent}: start it with --features eagle3 --head and the same folder"
        )


@rule("Draft and target share `max_length`.")
def _shared_max_length(deployment: Deployment) -> Iterator[str]:
    draft = deployment.draft
    target = deployment.target
    # 0: the service has no limit.
    if draft is None or draft.max_length in (0, target.max_length):
        return
    shared = min(draft.max_length, target.max_length)
    yield (
        f"max_length is {draft.max_length} for the draft {draft.name} and {target.max_length} for the target "
        f"{target.name}; they must share one: start both with --max-length {shared}"
    )


@rule("`max_length`, when the coordinator has it, is what the target serves.")
def _configured_max_length(deployment: Deployment) -> Iterator[str]:
    configured = deployment.config.max_length
    target = deployment.target
    if configured not in (None, target.max_length):
        yield (
            f"max_length is {configured} for the coordinator and {target.max_length} for the target {target.name}; "
            f"they must share one: start all with --max-length {configured}, or leave it out here"
        )


@rule("`draft_tensor_parallel_size` is 1 or the target's, and the draft's own.")
def _tensor_parallel_size(deployment: Deployment) -> Iterator[str]:
    draft = deployment.draft_model
    target = deployment.target
    if draft is None:
        return
    configured = deployment.config.draft_tensor_parallel_size
    wanted = configured or draft.tensor_parallel_size
    allowed = {1, target.tensor_parallel_size}
    if wanted not in allowed:
        words = " or ".join(map(str, sorted(allowed)))
        yield f"draft_tensor_parallel_size is {wanted}; it must be {words}: 1 or the target's"
    elif wanted != draft.tensor_parallel_size:
        yield (
            f"draft_tensor_parallel_size is {wanted}; it must be what the draft {draft.name} was started with, "
            f"{draft.tensor_parallel_size}"
        )


MODEL_RULES: tuple[Rule[Deployment], ...] = (
    _drafting_method,
    _vocabulary_size,
    _tokenizer,
    _hidden_states,
    _shared_max_length,
    _configured_max_length,
    _tensor_parallel_size,
)


MAX_ROWS = max(MAX_SPECULATIVE_TOKENS, MAX_CONFIGURED_TOKENS) + 1
"""Maximum rows of one answer, for the limit on a message's size: one for each token of the longest proposal that
configuration and requests may ask for, and one after it."""

# A replica of another release may serve the same model, only some targets may have a head, each measures its steps
# and has an id of its own. Of their sampling defaults only what is in force matters.
_MAY_DIFFER = frozenset(
    {
        "service_version",
        "drafting_method",
        "step_profile",
        "head_step_profile",
        "sampling_defaults",
        "instance_id",
        "weights",
    }
)


def head_of(target: ModelInfo) -> ModelInfo:
    """The head of a target that drafts by itself, as a draft."""
    name = f"{target.name} ({target.drafting_method})"
    return replace(target, name=name, step_profile=target.head_step_profile)


class Fleet:
    """The model that all targets must serve, and the kind of draft that all drafts must be.

    A stream moves from one target to another between two tokens, so all targets must compute the same model alike.
    Drafts may be different models as long as each fits the target, which verifies their proposals.
    """

    def __init__(
        self, config: SpeculativeConfig, sampling: SamplingPolicy | None = None, *, takes_heads: bool = True
    ) -> None:
        """
        Args:
            config: What the models must fit.
            sampling: None: requests are sampled by their targets' own defaults.
            takes_heads: Let targets with heads of their own propose; where there are draft services, those do.
        """
        self._config = config
        self._takes_heads = takes_heads
        self._sampling = sampling or SamplingPolicy(SamplingOptions())
        self.target: ModelInfo | None = None
        """The first target that was reached."""
        self.draft: ModelInfo | None = None
        """The first of the drafts that fit it and are not gone; without draft services the targets' own head."""
        self.newest_weights: Weights | None = None
        """Of any target so far: each has to serve them. None where targets do not say."""

    def meet_weights(self, info: ModelInfo) -> None:
        """Learn which weights a target serves."""
        weights = info.weights
        newest = self.newest_weights
        if weights is not None and (newest is None or weights.version > newest.version):
            self.newest_weights = weights

    def outdated_because(self, info: ModelInfo) -> str:
        """Reason why a target's weights are not those of the others; empty where they are."""
        weights = info.weights
        newest = self.newest_weights
        if weights is None or newest is None or weights.fingerprint == newest.fingerprint:
            return ""
        own, others = (f"{each.fingerprint[:12]} (version {each.version})" for each in (weights, newest))
        return (
            f"its weights are {own} and the newest of the targets are {others}; load the same with tandem admin "
            "weights load target"
        )

    @property
    def message_limit_bytes(self) -> int:
        if self.target is None:
            return DEFAULT_MESSAGE_LIMIT_BYTES
        return message_limit(self.target.vocabulary_size, MAX_ROWS)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters of a request that names none; none before the first target."""
        return SamplingDefaults() if self.target is None else self._sampling.defaults_of(self.target)

    def judge_target(self, info: ModelInfo) -> str:
        """Reason why a target with this model cannot join; empty when it can. The first one sets the standard."""
        if wrong := [*self._sampling.refusals(info)]:
            return "; ".join(wrong)
        if self.target is None:
            self.target = info
        if self.draft is None and info.drafting_method and self._takes_heads:
            self.draft = head_of(info)
        differences = [
            f"{field.name} is {_show(info, field.name)} for this target and {_show(self.target, field.name)} for the "
            "others; all targets must serve one model alike"
            for field in fields(ModelInfo)
            if field.name not in _MAY_DIFFER and getattr(info, field.name) != getattr(self.target, field.name)
        ]
        own = self._sampling.defaults_of(info)
        if own != self.sampling_defaults:
            differences.append(
                f"the sampling defaults are {own} for this target and {self.sampling_defaults} for the others; give "
                "all targets one generation_config.json, or start the coordinator with --generation-config "
                f"{VLLM} or a folder"
            )
        if not differences:
            self.meet_weights(info)
        return "; ".join(differences)

    def judge_draft(self, info: ModelInfo, *, has_others: bool = False) -> str:
        """Reason why a draft with this model cannot join the others; empty when it can."""
        assert self.target is not None, "drafts are reached after the first target"
        if sentences := broken(MODEL_RULES, Deployment(self._config, self.target, info)):
            return "; ".join(sentences)
        if self.draft is None or not has_others:
            self.draft = info
        if info.has_model == self.draft.has_model:
            return ""
        own, other = ("with a model" if each.has_model else "without a model" for each in (info, self.draft))
        return (
            f"the draft {info.name} drafts {own} and the other drafts {other}; they must draft alike: what a request "
            "may ask for depends on it"
        )


def _show(info: ModelInfo, name: str) -> str:
    value = getattr(info, name)
    return value[:12] if name == "tokenizer_hash" else str(value)

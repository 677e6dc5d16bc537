"""Requests of the coordinator to a draft or target service, and the service's model information."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.types.ahead import AheadBudget
from tandem.types.arrays import IntArray
from tandem.types.rounds import Delta, RowKind
from tandem.types.sampling import LogitAdjustments, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options with which a sequence opens on a draft service."""

    request_id: str
    sampling: SamplingParams
    max_length: int = 0
    """Maximum tokens of the sequence; 0 means the model's own maximum."""
    row_kind: RowKind = RowKind.TOKEN
    """Which distribution travels with each proposed token."""
    draft_top_k: int = 0
    """For RowKind.SUPPORT, how many of its most probable tokens the draft keeps; 0 means the service's default."""
    with_token_logits: bool = False
    traceparent: str = ""
    ahead: AheadBudget | None = None
    """The largest budget that a step will grant; None where none does."""
    takes_columns: bool = False
    """True if proposals may come as columns."""
    client: str = ""
    """Whose sequence it is: clients share places fairly. Empty: not known."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Options with which a sequence opens on a target service."""

    request_id: str
    sampling: SamplingParams
    max_length: int = 0
    """Maximum tokens of the sequence; 0 means the model's own maximum."""
    traceparent: str = ""
    prompt_length: int = 0
    """How many of the sequence's first tokens are the prompt; frequency and presence count the others only."""
    adjustments: LogitAdjustments = field(default_factory=LogitAdjustments)
    """Only for a service that has `ModelFeature.LOGIT_ADJUSTMENTS`."""
    takes_columns: bool = False
    """True if rows may come as columns."""
    client: str = ""
    """Whose sequence it is: clients share places fairly. Empty: not known."""


@dataclass(frozen=True, slots=True)
class ProposeStep:
    """Changes a sequence on the draft and asks for a proposal."""

    delta: Delta
    token_count: int
    """Tokens to propose; 0 only computes the KV cache."""
    ahead: AheadBudget | None = None
    """Budget for drafting ahead; None for none."""
    proposed_count: int = 0
    """How many of the last tokens are a proposal that is being verified."""

    @property
    def is_answered(self) -> bool:
        """True if the step has an answer of its own; otherwise it asks for outcomes alone."""
        return self.ahead is None or self.token_count > 0


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Changes a sequence on the target and asks for rows at its last positions."""

    delta: Delta
    row_kind: RowKind
    row_count: int
    """Rows to answer with; the last one is for the token after the sequence's end."""
    supports: tuple[IntArray, ...] = ()
    """For RowKind.SUPPORT, the ids of each row's support; rows past the end of the list have an empty one."""
    with_statistics: bool = False
    raced_recovery: bool = False
    """For RowKind.SUPPORT, sample outside the supports with `recovery_keys`, and send the samples'
    probabilities."""


class ModelFeature(Enum):
    """An ability that an older service lacks; the coordinator uses only those that a service announces."""

    LOGIT_ADJUSTMENTS = "logit adjustments"
    """The target applies `LogitAdjustments`."""


@dataclass(frozen=True, slots=True)
class GraphCaptures:
    """The CUDA graphs that a service captured when it started."""

    captured_count: int
    """Number of sizes."""
    missing: tuple[str, ...] = ()
    """A sentence for each size that was not captured, with the reason."""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Information about the model that a service serves."""

    name: str
    architecture: str
    vocabulary_size: int
    tokenizer_hash: str
    max_length: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    service_version: str = ""
    parameter_count: int = 0
    tensor_parallel_size: int = 1
    """Devices that the model is split over."""
    features: frozenset[ModelFeature] = frozenset()
    captures: GraphCaptures | None = None
    """None where no graphs are captured, as on a CPU."""
    drafting_method: str = ""
    """Method of a draft that reads a target's hidden states: the service's own, for the target at its address alone, or
    that of the draft which a target hosts. Empty otherwise."""

    @property
    def has_model(self) -> bool:
        """True if there is a model at all: a service that drafts without one has no vocabulary either."""
        return self.vocabulary_size > 0

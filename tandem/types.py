"""The nouns of speculative decoding, as the stages of a round hand them to each other.

A `Proposal` comes from the draft, a `Verification` from the target, an `Acceptance` from the rule that joins them.
Nothing here knows of gRPC or torch: `tandem.wire` is where these types meet protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Delta:
    """Sets the tail of a sequence: ``tokens[base_length:] = token_ids``."""

    base_length: int
    token_ids: Sequence[int]

    @property
    def length(self) -> int:
        """Length of the sequence once the delta is applied."""
        return self.base_length + len(self.token_ids)


LEAST_TEMPERATURE = 1e-4
"""Of those that are not 0, which is greedy: a logit divided by less may be beyond what binary32 holds."""
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0
"""For the same reason."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from logits: penalties, then temperature, then top-k, then top-p, then min-p.

    The order is that of the logits processors in Hugging Face transformers.
    """

    temperature: float = 1.0
    """Divides the logits. 0 is greedy, and the fields below have no effect."""
    top_k: int = 0
    """Keep only the highest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep only the smallest set of most probable tokens with at least this mass; 1 keeps all."""
    min_p: float = 0.0
    """Keep only tokens with at least this share of the highest probability; 0 keeps all."""
    seed: int = 0
    """Keys all randomness of the sequence, together with a position and a purpose. A signed 64-bit integer."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occurred, in the prompt too, and multiplies the negative; 1 is off."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the completion holds it; 0 is off."""
    presence_penalty: float = 0.0
    """Taken off a token's logit once if the completion holds it; 0 is off."""

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit always wins."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on whether it occurred before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """Whether any token of positive probability is left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class RowKind(Enum):
    """What is told of a distribution at one position."""

    TOKEN = "token"
    """One id: the highest logit at temperature 0, else a sample made with the noise both models share."""
    SUPPORT = "support"
    """Probabilities on a small support, and what exact rejection sampling needs to know of the rest."""
    DENSE = "dense"
    """Logits of the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseDistribution:
    """Probabilities of a few tokens that sum to one; every other token has none."""

    token_ids: IntArray
    """Distinct ids, shape [support_size]."""
    probs: FloatArray
    """Their probabilities, shape [support_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseLogits:
    """Logits of the whole vocabulary, before temperature and truncation."""

    logits: Float32Array
    """Shape [vocabulary_size]."""


DraftDistribution = SparseDistribution | DenseLogits
"""What a proposed token was drawn from, as a draft service tells it."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Tokens that the draft expects the target to say next."""

    base_length: int
    """Length of the sequence that the proposal extends."""
    token_ids: tuple[int, ...] = ()
    """The proposed tokens, K of them, possibly none."""
    distributions: tuple[DraftDistribution, ...] = ()
    """What each token was drawn from. Empty when the proposal is deterministic: each distribution is then one-hot."""
    token_logits: Float32Array | None = None
    """Each token's logit before temperature, shape [K]. None unless it was asked for."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token id of the target at a position."""

    token_id: int


@dataclass(frozen=True, slots=True, eq=False)
class RowStatistics:
    """Figures of a whole row that cannot be had from its support."""

    entropy: float
    """Shannon entropy, in nats."""
    max_prob: float
    """Highest probability."""
    argmax_token_id: int
    """The token that has it; the lowest id among equals."""
    ranks: IntArray
    """For each id of the support, how many tokens are more probable; shape [support_size]."""
    logits: Float32Array
    """For each id of the support, its logit before temperature; shape [support_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class SupportRow:
    """The target's distribution at a position as far as exact rejection sampling can ask for it.

    Outside the draft's support the residual max(target - draft, 0) is the target's own distribution, so its mass and
    one sample of it say everything.
    """

    token_ids: IntArray
    """The support that was asked for, shape [support_size]; empty for a position past the proposal."""
    probs: FloatArray
    """The target's probabilities there, shape [support_size]."""
    outside_mass: float
    """Probability outside the support."""
    outside_token_id: int
    """A sample of the target restricted to outside the support; -1 when there is no mass there."""
    statistics: RowStatistics | None = None
    """Set when the step asked for it."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseRow:
    """Logits of the target at a position, before temperature and truncation."""

    logits: Float32Array
    """Shape [vocabulary_size]."""


TargetRow = TokenRow | SupportRow | DenseRow


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """The target's answer to a proposal: one row for each proposed token and one for the token after them."""

    base_length: int
    """Length of the sequence whose next token the first row tells."""
    rows: tuple[TargetRow, ...]
    """K + 1 rows, all of one kind."""


class NextToken(Enum):
    """Where the token after the accepted run comes from."""

    BONUS = "bonus"
    """Everything proposed was accepted; the target supplied one more."""
    RECOVERED = "recovered"
    """A proposed token was rejected; this one stands in its place."""
    NONE = "none"
    """The rule supplies no token here."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What is kept of a proposal."""

    accepted_count: int
    """How many of the proposed tokens are kept, from the first on."""
    next_token_id: int
    """The token after them; -1 when `next_token` is NONE."""
    next_token: NextToken


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What a draft service is told when a sequence opens."""

    request_id: str
    sampling: SamplingParams
    max_length: int = 0
    """Most tokens the sequence will hold; 0 means the model's own maximum."""
    row_kind: RowKind = RowKind.TOKEN
    """Which distribution travels with each proposed token."""
    draft_top_k: int = 0
    """For RowKind.SUPPORT, how many of its most probable tokens the draft keeps; 0 means the service's default."""
    with_token_logits: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What a target service is told when a sequence opens."""

    request_id: str
    sampling: SamplingParams
    max_length: int = 0
    """Most tokens the sequence will hold; 0 means the model's own maximum."""
    traceparent: str = ""
    prompt_length: int = 0
    """How many of the sequence's first tokens are the prompt; frequency and presence count the others only."""


@dataclass(frozen=True, slots=True)
class ProposeStep:
    """Changes a sequence on the draft and asks for a proposal."""

    delta: Delta
    token_count: int
    """Tokens to propose; 0 only computes the KV cache."""


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Changes a sequence on the target and asks for rows at its last positions."""

    delta: Delta
    row_kind: RowKind
    row_count: int
    """Rows to answer with; the last of them tells the token after the sequence's end."""
    supports: tuple[IntArray, ...] = ()
    """For RowKind.SUPPORT, the ids of each row's support; rows past the end of the list have an empty one."""
    with_statistics: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a service says of the model it serves."""

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

    @property
    def has_model(self) -> bool:
        """Whether there is a model at all: a service that drafts without one has no vocabulary either."""
        return self.vocabulary_size > 0


@dataclass(slots=True)
class PositionFigures:
    """What became of the tokens proposed at one position of the proposal."""

    drafted: int = 0
    reached: int = 0
    """Of these, whose predecessors in the proposal were all accepted."""
    accepted: int = 0


class FinishReason(Enum):
    """Why a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class SpeculationFigures:
    """Counts of what speculation did, for one request or for many."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    positions: list[PositionFigures] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how to complete it. None stands for the coordinator's default."""

    prompt: str | tuple[int, ...]
    """Text, or token ids of the target's vocabulary."""
    max_tokens: int | None = None
    """Most tokens to generate; by default as many as max_length leaves room for."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    """As transformers defines it, over prompt and completion; 1 is off."""
    frequency_penalty: float | None = None
    """As OpenAI and vLLM define it, over the completion; 0 is off."""
    presence_penalty: float | None = None
    """As OpenAI and vLLM define it, over the completion; 0 is off."""
    seed: int | None = None
    """Makes the completion reproducible; by default drawn at random."""
    stop: tuple[str, ...] = ()
    """The completion ends before the first of these strings."""
    num_speculative_tokens: int | None = None
    """Tokens proposed per verification."""
    rejection_sampling_strategy: str | None = None
    """Acceptance rule, in MAX's or vLLM's spelling."""
    speculation: bool = True
    """False: the target alone, through the same path."""
    row_kind: RowKind | None = None
    """Rows that the target answers with; by default the cheapest that the acceptance rule allows."""
    ignore_eos: bool = False
    """Do not end the completion at the model's end-of-sequence ids."""
    logprobs: int | None = None
    """Tell each token's log probability, and those of this many of the target's most probable tokens, 0 to 20.

    It takes dense rows, which weigh the whole vocabulary for each position. None: nothing is told.
    """


@dataclass(frozen=True, slots=True)
class Summary:
    """How a completion ended and what it took."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationFigures
    request_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the target finds the tokens at a position, before temperature and truncation: natural logarithms."""

    logprob: float
    """Of the token that stands there."""
    top_token_ids: tuple[int, ...] = ()
    """The most probable tokens, the most probable first; as many as were asked for."""
    top_logprobs: tuple[float, ...] = ()
    """Theirs, in the same order."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a completion."""

    text: str
    """Text that became certain; never ends inside a character or inside a possible stop string."""
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """For each token, whether the draft proposed it and the target accepted it."""
    text_lengths: tuple[int, ...]
    """For each token, how many characters of the text it completed."""
    summary: Summary | None = None
    """Set on the last piece."""
    proposed: int = 0
    """How many tokens the draft had proposed for this piece, accepted or not."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token, when the request asked for them."""

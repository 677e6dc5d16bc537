"""The nouns of speculative decoding.

Nothing here knows of gRPC or torch: `tandem.wire` is where these types meet protobuf. Imported from everywhere;
imports nothing but `tandem.speculation_state`.
"""

from tandem.types.ahead import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    AheadBudget,
    DraftedOutcomes,
)
from tandem.types.arrays import (
    Float32Array,
    FloatArray,
    IntArray,
)
from tandem.types.generation import (
    AheadStats,
    ChatMessage,
    Chunk,
    FinishReason,
    GenerationRequest,
    PositionStats,
    SpeculationStats,
    Summary,
    TokenLogprobs,
)
from tandem.types.rounds import (
    Acceptance,
    Delta,
    DenseLogits,
    DenseRow,
    DraftDistribution,
    NextToken,
    Proposal,
    RowKind,
    RowStatistics,
    SparseDistribution,
    StepCost,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)
from tandem.types.sampling import (
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    LogitAdjustments,
    SamplingParams,
)
from tandem.types.services import (
    DraftOptions,
    GraphCaptures,
    ModelFeature,
    ModelInfo,
    ProposeStep,
    TargetOptions,
    VerifyStep,
)

__all__ = [
    "MAX_AHEAD_TOKENS",
    "MAX_BRANCHES",
    "MAX_LOGIT_BIAS",
    "MAX_REPETITION_PENALTY",
    "MIN_REPETITION_PENALTY",
    "MIN_TEMPERATURE",
    "Acceptance",
    "AheadBudget",
    "AheadStats",
    "ChatMessage",
    "Chunk",
    "Delta",
    "DenseLogits",
    "DenseRow",
    "DraftDistribution",
    "DraftOptions",
    "DraftedOutcomes",
    "FinishReason",
    "Float32Array",
    "FloatArray",
    "GenerationRequest",
    "GraphCaptures",
    "IntArray",
    "LogitAdjustments",
    "ModelFeature",
    "ModelInfo",
    "NextToken",
    "PositionStats",
    "Proposal",
    "ProposeStep",
    "RowKind",
    "RowStatistics",
    "SamplingParams",
    "SparseDistribution",
    "SpeculationStats",
    "StepCost",
    "Summary",
    "SupportRow",
    "TargetOptions",
    "TargetRow",
    "TokenLogprobs",
    "TokenRow",
    "Verification",
    "VerifyStep",
]

"""Messages that both internal protocols share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from tandem.config.rule import Rule, broken, refuse
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.sampling.ranges import sampling_rules
from tandem.model.types import (
    ENDED,
    Coverage,
    Delta,
    DraftedOutcomes,
    EngineStatistics,
    Float32Array,
    Grammar,
    IntArray,
    ModelInfo,
    Proposal,
    RowKind,
    SamplingDefaults,
    SamplingParams,
    SequenceOptions,
    SparseDistribution,
    StepCost,
    StepProfile,
    TokenHistogram,
    Weights,
)
from tandem.serving.scopes import MAX_SCOPE_LENGTH
from tandem.v1 import types_pb2
from tandem.wire.bounds import check_message
from tandem.wire.converter import Codec, Converter, enum_codec

# ---- parts of an Open

_SAMPLING_RULES: tuple[Rule[SamplingParams], ...] = sampling_rules()
_SAMPLING: Converter[SamplingParams, types_pb2.SamplingParams] = Converter(
    SamplingParams, types_pb2.SamplingParams
)
sampling_to_proto = _SAMPLING.to_proto
ROW_KIND = enum_codec(RowKind, types_pb2.RowKind.DESCRIPTOR, "row_kind")
GRAMMAR: Converter[Grammar, types_pb2.Grammar] = Converter(Grammar, types_pb2.Grammar)


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """The sampling parameters of a message."""
    sampling = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
    )
    refuse(broken(_SAMPLING_RULES, sampling))
    return sampling


SAMPLING = Codec(SamplingParams, _SAMPLING.encode, sampling_from_proto)


def missing(name: str) -> InvalidRequestError:
    """The refusal of a message without a part that it must have."""
    return InvalidRequestError(f"{name} is missing; it must be set")


def write_options(message: Any, options: SequenceOptions) -> None:
    """Write what the Opens of both services share."""
    message.request_id = options.request_id
    message.sampling.MergeFrom(sampling_to_proto(options.sampling))
    message.max_length = options.max_length
    message.prompt_token_count = options.prompt_length
    message.traceparent = options.traceparent
    message.client = options.client
    message.scope = options.scope
    if options.grammar is not None:
        message.grammar.MergeFrom(GRAMMAR.to_proto(options.grammar))


def read_options(message: Any) -> dict[str, Any]:
    """Read what the Opens of both services share, as the fields of `SequenceOptions`."""
    if not message.HasField("sampling"):
        raise missing("open.sampling")
    if len(message.scope) > MAX_SCOPE_LENGTH:
        raise InvalidRequestError(
            f"scope has {len(message.scope)} characters; it must have at most {MAX_SCOPE_LENGTH}"
        )
    if message.prompt_token_count < 0:
        raise InvalidRequestError(
            f"prompt_token_count is {message.prompt_token_count}; it must be at least 0"
        )
    return {
        "request_id": message.request_id,
        "sampling": sampling_from_proto(message.sampling),
        "max_length": message.max_length,
        "prompt_length": message.prompt_token_count,
        "traceparent": message.traceparent,
        "client": message.client,
        "scope": message.scope,
        "grammar": GRAMMAR.from_proto(message.grammar) if message.HasField("grammar") else None,
    }


# ---- parts of streams


class _Part(Protocol):
    """A part of a request or a response."""

    @property
    def sequence(self) -> int: ...


def check_sequence(part: _Part) -> int:
    """The number of a part's sequence. With another one nobody could be told what is wrong."""
    sequence = part.sequence
    if sequence < 1:
        raise ProtocolError(f"a part's sequence is {sequence}; sequences count from 1")
    return sequence


def write_delta(message: types_pb2.Delta, delta: Delta, following: int) -> Sequence[int]:
    """Write a delta without its last tokens, so many, which are a proposal and are returned."""
    token_ids = delta.token_ids
    message.base_length = delta.base_length
    if not following:
        message.token_ids.extend(token_ids)
        return ()
    split = len(token_ids) - following
    assert split >= 0, "a delta begins before the proposal that it ends with"
    message.token_ids.extend(token_ids[:split])
    return token_ids[split:]


def read_delta(step: Any, proposed: Sequence[int]) -> Delta:
    """The delta of a step that commits tokens, and then proposes some."""
    if not step.HasField("committed"):
        raise missing("step.committed")
    committed = step.committed
    base_length = committed.base_length
    if base_length < 0:
        raise InvalidRequestError(f"committed.base_length is {base_length}; it must be at least 0")
    return Delta(base_length, (*committed.token_ids[:], *proposed))


def write_cost(message: types_pb2.StepCost, cost: StepCost) -> None:
    """Write what a step took."""
    message.seconds = cost.seconds
    message.sequence_count = cost.sequences
    message.token_count = cost.tokens


def read_cost(message: types_pb2.StepCost) -> StepCost | None:
    """The reported cost; None for impossible values, which would mislead a cost model."""
    seconds = message.seconds
    sequences = message.sequence_count
    tokens = message.token_count
    # More than an hour is a mistake of the service
    if not 0.0 < seconds < 3600.0 or sequences < 1 or tokens < sequences:
        return None
    return StepCost(seconds, sequences, tokens)


# ---- what tokens were drawn from


def write_distribution(message: types_pb2.Distribution, distribution: SparseDistribution) -> None:
    """Write what a token was drawn from."""
    message.token_ids.extend(distribution.token_ids.tolist())
    message.probabilities.extend(distribution.probs.tolist())


def read_distribution(message: types_pb2.Distribution) -> SparseDistribution:
    """The distribution in a message, divided by its sum."""
    token_ids = message.token_ids[:]
    probs = message.probabilities[:]
    if len(token_ids) != len(probs):
        raise ProtocolError(f"a distribution has {len(probs)} probabilities for {len(token_ids)} ids")
    # Supports are short: Python's own sum over a list is faster than numpy's, which takes microseconds to begin.
    total = sum(probs)
    # binary32 rounded each probability; the draft sampled in proportion to them. One that does not sum to 1 stays as
    # it is, for whoever refuses it.
    divisor = total if sums_to_one(total) else 1.0
    return SparseDistribution(int_array(token_ids), np.array(probs) / divisor)


def sums_to_one(total: float) -> bool:
    """True if probabilities with this sum may be a distribution, after rounding to binary32."""
    return 0.999 < total < 1.001


def write_proposal(message: types_pb2.Proposal, proposal: Proposal) -> None:
    """Write a proposal, with what it was drawn from and what it took."""
    message.base_length = proposal.base_length
    message.token_ids.extend(proposal.token_ids)
    for distribution in proposal.distributions:
        write_distribution(message.distributions.add(), distribution)
    if proposal.token_logits is not None:
        message.token_logits.extend(proposal.token_logits.tolist())
    if proposal.cost is not None:
        write_cost(message.cost, proposal.cost)


def read_proposal(message: types_pb2.Proposal) -> Proposal:
    """The proposal in a message. One that only some of its tokens have distributions or logits for is refused."""
    token_ids = tuple(message.token_ids[:])
    distributions = tuple(map(read_distribution, message.distributions))
    count = len(token_ids)
    if len(distributions) not in (0, count):
        raise ProtocolError(
            f"{count} tokens came with {len(distributions)} distributions; there must be one for each token or none"
        )
    logits = message.token_logits[:]
    if len(logits) not in (0, count):
        raise ProtocolError(
            f"{count} tokens came with {len(logits)} logits; there must be one for each token or none"
        )
    return Proposal(
        base_length=message.base_length,
        token_ids=token_ids,
        distributions=distributions,
        token_logits=np.array(logits, np.float32) if logits else None,
        cost=read_cost(message.cost) if message.HasField("cost") else None,
    )


def int_array(values: Sequence[int]) -> IntArray:
    """Ids as an array, also where there are none."""
    return np.array(values, np.int64)


# ---- outcomes


def write_outcomes(message: types_pb2.DraftedOutcomes, drafted: DraftedOutcomes) -> None:
    """Write one depth of what is proposed after outcomes."""
    message.base_length = drafted.base_length
    message.depth = drafted.depth
    message.further_token_ids.extend(drafted.lead_token_ids)
    continuations = message.continuations
    for token_id in drafted.token_ids:
        continuation = continuations.add()
        if token_id != ENDED:
            continuation.token_id = token_id
    outcomes = zip(drafted.accepted_counts, drafted.next_token_ids, strict=True)
    for continuation, (accepted_count, next_token_id) in zip(continuations, outcomes, strict=False):
        continuation.outcome.accepted_count = accepted_count
        continuation.outcome.next_token_id = next_token_id
    for continuation, distribution in zip(continuations, drafted.distributions, strict=False):
        write_distribution(continuation.drawn_from, distribution)
    if drafted.cost is not None:
        write_cost(message.cost, drafted.cost)


def read_outcomes(message: types_pb2.DraftedOutcomes) -> DraftedOutcomes:
    """The outcomes in a message. One that only some of its continuations have is refused: whose is which?"""
    named: list[types_pb2.Outcome] = []
    token_ids: list[int] = []
    distributions: list[SparseDistribution] = []
    for each in message.continuations:
        if each.HasField("outcome"):
            named.append(each.outcome)
        token_ids.append(each.token_id if each.HasField("token_id") else ENDED)
        if each.HasField("drawn_from"):
            distributions.append(read_distribution(each.drawn_from))
    count = len(token_ids)
    if len(named) not in (0, count):
        raise ProtocolError(
            f"continuations.outcome is missing in {count - len(named)} of {count}; at depth 0 it must be set in all"
        )
    if len(distributions) not in (0, count):
        raise ProtocolError(
            f"{count} continuations came with {len(distributions)} distributions; there must be one for each or none"
        )
    return DraftedOutcomes(
        base_length=message.base_length,
        depth=message.depth,
        token_ids=tuple(token_ids),
        accepted_counts=tuple(each.accepted_count for each in named),
        next_token_ids=tuple(each.next_token_id for each in named),
        distributions=tuple(distributions),
        lead_token_ids=tuple(message.further_token_ids[:]),
        cost=read_cost(message.cost) if message.HasField("cost") else None,
    )


# ---- models


def _profile_to_proto(profile: StepProfile) -> types_pb2.StepProfile:
    steps = (
        types_pb2.StepTime(sequence_count=sequences, token_count=tokens, seconds=seconds)
        for (sequences, tokens), seconds in profile.seconds.items()
    )
    return types_pb2.StepProfile(steps=steps, version=profile.version)


def _profile_from_proto(message: types_pb2.StepProfile) -> StepProfile:
    seconds = {(step.sequence_count, step.token_count): step.seconds for step in message.steps}
    return StepProfile(seconds, message.version)


SAMPLING_DEFAULTS: Converter[SamplingDefaults, types_pb2.SamplingDefaults] = Converter(
    SamplingDefaults, types_pb2.SamplingDefaults, max_new_tokens="max_new_token_count"
)
WEIGHTS: Converter[Weights, types_pb2.Weights] = Converter(Weights, types_pb2.Weights)
_MODEL_INFO: Converter[ModelInfo, types_pb2.ModelInfo] = Converter(
    ModelInfo,
    types_pb2.ModelInfo,
    SAMPLING_DEFAULTS,
    WEIGHTS,
    Codec(StepProfile, _profile_to_proto, _profile_from_proto),
)
model_info_to_proto = _MODEL_INFO.to_proto


def model_info_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    """The model of a service."""
    check_message(message)
    for name in ("vocabulary_size", "max_length", "tensor_parallel_size"):
        if (value := getattr(message, name)) < 0:
            raise ProtocolError(f"{name} of the model is {value}; it must be at least 0")
    info = _MODEL_INFO.from_proto(message)
    return info if info.tensor_parallel_size else replace(info, tensor_parallel_size=1)


_HISTOGRAM: Converter[TokenHistogram, types_pb2.TokenHistogram] = Converter(
    TokenHistogram, types_pb2.TokenHistogram
)
_STATISTICS: Converter[EngineStatistics, types_pb2.EngineStatistics] = Converter(
    EngineStatistics, types_pb2.EngineStatistics, _HISTOGRAM
)
statistics_to_proto = _STATISTICS.to_proto
_MAX_BOUNDS = 64


def statistics_from_proto(message: types_pb2.EngineStatistics) -> EngineStatistics:
    """Figures of a service's engine."""
    check_message(message)
    statistics = _STATISTICS.from_proto(message)
    if not message.HasField("step_tokens"):
        statistics = replace(statistics, step_tokens=TokenHistogram())
    steps = statistics.step_tokens
    bounds = steps.upper_bounds
    if len(bounds) > _MAX_BOUNDS:
        raise ProtocolError(f"step_tokens has {len(bounds)} upper_bounds; it must have at most {_MAX_BOUNDS}")
    if len(steps.counts) != len(bounds) + 1:
        raise ProtocolError(
            f"step_tokens has {len(steps.counts)} counts for {len(bounds)} upper_bounds; it must have one more"
        )
    if list(bounds) != sorted(set(bounds)):
        raise ProtocolError("upper_bounds of step_tokens do not ascend; each must be above the one before")
    numbers = [
        getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.message_type is None
    ]
    lowest = min(*numbers, *bounds, *steps.counts, steps.token_sum)
    if lowest < 0:
        raise ProtocolError(f"a number of the engine's statistics is {lowest}; it must be at least 0")
    return statistics


MODEL_INFO = Codec(ModelInfo, _MODEL_INFO.encode, model_info_from_proto)
COVERAGE: Converter[Coverage, types_pb2.VocabularyCoverage] = Converter(
    Coverage, types_pb2.VocabularyCoverage
)


def file_parts(content: bytes) -> Iterator[bytes]:
    """A file in parts for messages, of which gRPC allows 4 MiB."""
    size = 1 << 20
    for start in range(0, len(content), size):
        yield content[start : start + size]


# ---- logits


def logits_to_tensor(logits: Float32Array) -> types_pb2.Tensor:
    """Rows of logits as a binary32 tensor, rows times vocabulary."""
    return types_pb2.Tensor(
        data_type=types_pb2.DATA_TYPE_FLOAT32,
        shape=logits.shape,
        data=logits.astype("<f4", copy=False).tobytes(),
    )


_SHOWN_DIMENSIONS = 4
"""Of a wrong shape, in its refusal."""

# bfloat16 is the upper half of binary32, which numpy has no name for.
_DATA_TYPES = {
    types_pb2.DATA_TYPE_FLOAT32: "<f4",
    types_pb2.DATA_TYPE_FLOAT16: "<f2",
    types_pb2.DATA_TYPE_BFLOAT16: "<u2",
}


def logits_from_tensor(tensor: types_pb2.Tensor, what: str) -> Float32Array:
    """Rows of logits as binary32, whatever type they travelled in."""
    # A peer may name dimensions without number, and rows that take no bytes.
    if len(tensor.shape) != 2 or min(tensor.shape) < 1:
        raise ProtocolError(
            f"{what} has the shape {list(tensor.shape[:_SHOWN_DIMENSIONS])} of {len(tensor.shape)} dimensions; it must "
            "be rows times vocabulary, at least 1 each"
        )
    if (form := _DATA_TYPES.get(tensor.data_type)) is None:
        raise ProtocolError(
            f"{what} has data type {tensor.data_type}; it must be float32, float16 or bfloat16"
        )
    shape = tuple(tensor.shape)
    dtype = np.dtype(form)
    size = shape[0] * shape[1] * dtype.itemsize
    if len(tensor.data) != size:
        raise ProtocolError(f"{what} holds {len(tensor.data)} bytes; its shape {shape} needs {size}")
    logits = np.frombuffer(tensor.data, dtype)
    if form == "<u2":
        logits = (logits.astype(np.uint32) << 16).view(np.float32)
    return logits.astype(np.float32, copy=False).reshape(shape)

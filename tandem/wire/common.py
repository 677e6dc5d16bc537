"""Messages that both internal protocols share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tandem.config.rule import Rule, broken
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.sampling.ranges import sampling_rules
from tandem.types import (
    Delta,
    Float32Array,
    FloatArray,
    IntArray,
    ModelFeature,
    ModelInfo,
    RowKind,
    SamplingParams,
    StepCost,
)
from tandem.v1 import types_pb2

MAX_STEP_SECONDS = 3600.0
"""A step cost beyond this is a mistake of the service."""

_ROW_KINDS = {
    RowKind.TOKEN: types_pb2.ROW_KIND_TOKEN,
    RowKind.SUPPORT: types_pb2.ROW_KIND_SUPPORT,
    RowKind.DENSE: types_pb2.ROW_KIND_DENSE,
}
_ROW_KINDS_BACK = {value: kind for kind, value in _ROW_KINDS.items()}

_SAMPLING_RULES: tuple[Rule[SamplingParams], ...] = sampling_rules()

_FEATURES = {ModelFeature.LOGIT_ADJUSTMENTS: types_pb2.MODEL_FEATURE_LOGIT_ADJUSTMENTS}
_FEATURES_BACK = {value: feature for feature, value in _FEATURES.items()}


def row_kind_to_proto(kind: RowKind) -> types_pb2.RowKind.ValueType:
    """The protocol's word for a row kind."""
    return _ROW_KINDS[kind]


def row_kind_from_proto(value: types_pb2.RowKind.ValueType) -> RowKind:
    """The row kind that a message names.

    Raises:
        InvalidRequestError: it names none, or one of a later version.
    """
    try:
        return _ROW_KINDS_BACK[value]
    except KeyError:
        names = ", ".join(types_pb2.RowKind.Name(known) for known in _ROW_KINDS_BACK)
        raise InvalidRequestError(f"row_kind is {value}; it must be one of {names}") from None


def cost_to_proto(cost: StepCost | None) -> types_pb2.StepCost | None:
    """Convert a step cost to its message; None where it was not measured."""
    if cost is None:
        return None
    return types_pb2.StepCost(seconds=cost.seconds, sequence_count=cost.sequences, token_count=cost.tokens)


def cost_from_proto(message: types_pb2.StepCost) -> StepCost | None:
    """Read a step cost; None for impossible values, which would mislead a cost model."""
    return step_cost(message.seconds, message.sequence_count, message.token_count)


def step_cost(seconds: float, sequences: int, tokens: int) -> StepCost | None:
    """The cost that a service reports; None for impossible values."""
    if not 0.0 < seconds < MAX_STEP_SECONDS or sequences < 1 or tokens < sequences:
        return None
    return StepCost(seconds, sequences, tokens)


def set_delta(message: types_pb2.Delta, delta: Delta) -> None:
    """Write a delta into a message's field. Half as long as to make a message and copy it there."""
    message.base_length = delta.base_length
    message.token_ids.extend(delta.token_ids)


def delta_from_proto(message: types_pb2.Delta) -> Delta:
    """The delta of a message.

    Raises:
        InvalidRequestError: its base length is negative.
    """
    if message.base_length < 0:
        raise InvalidRequestError(f"delta.base_length is {message.base_length}; it must be at least 0")
    return Delta(message.base_length, list(message.token_ids))


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Sampling parameters as a message."""
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """The sampling parameters of a message.

    Raises:
        InvalidRequestError: one of them is out of range.
    """
    sampling = SamplingParams(
        message.temperature,
        message.top_k,
        message.top_p,
        message.min_p,
        message.seed,
        # An older peer sends 0, which means not known.
        message.repetition_penalty or 1.0,
        message.frequency_penalty,
        message.presence_penalty,
    )
    if sentences := broken(_SAMPLING_RULES, sampling):
        raise InvalidRequestError("; ".join(sentences))
    return sampling


def model_info_to_proto(info: ModelInfo) -> types_pb2.ModelInfo:
    """A model's description as a message."""
    return types_pb2.ModelInfo(
        name=info.name,
        architecture=info.architecture,
        vocabulary_size=info.vocabulary_size,
        tokenizer_hash=info.tokenizer_hash,
        max_length=info.max_length,
        dtype=info.dtype,
        eos_token_ids=info.eos_token_ids,
        service_version=info.service_version,
        parameter_count=info.parameter_count,
        tensor_parallel_size=info.tensor_parallel_size,
        drafting_method=info.drafting_method,
        features=[_FEATURES[feature] for feature in sorted(info.features, key=str)],
    )


def model_info_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    """The model's description in a message."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        vocabulary_size=message.vocabulary_size,
        tokenizer_hash=message.tokenizer_hash,
        max_length=message.max_length,
        dtype=message.dtype,
        eos_token_ids=tuple(message.eos_token_ids),
        service_version=message.service_version,
        parameter_count=message.parameter_count,
        tensor_parallel_size=message.tensor_parallel_size or 1,
        drafting_method=message.drafting_method,
        # A newer service may announce more features, which are ignored.
        features=frozenset(_FEATURES_BACK[value] for value in message.features if value in _FEATURES_BACK),
    )


def floats_to_bytes(values: FloatArray | Float32Array) -> bytes:
    """Little-endian binary32. A `repeated float` of a vocabulary costs milliseconds to encode, bytes do not."""
    return values.astype("<f4", copy=False).tobytes()


def floats_from_bytes(data: bytes, count: int, what: str) -> Float32Array:
    """Array of shape [count] over the message's own bytes, without a copy.

    Raises:
        ProtocolError: the bytes are not `count` floats.
    """
    if len(data) != 4 * count:
        raise ProtocolError(f"{what} holds {len(data)} bytes; it must hold {4 * count} for {count} values")
    return np.frombuffer(data, dtype="<f4")


def ids_to_array(token_ids: Iterable[int]) -> IntArray:
    """Repeated int32 as an int64 array, shape [count]."""
    return np.array(list(token_ids), dtype=np.int64)  # numpy would read each id separately


def logits_to_tensor(logits: Float32Array) -> types_pb2.Tensor:
    """Logits of any shape as a binary32 tensor."""
    return types_pb2.Tensor(
        data_type=types_pb2.DATA_TYPE_FLOAT32, shape=logits.shape, data=floats_to_bytes(logits)
    )


def logits_from_tensor(tensor: types_pb2.Tensor, what: str) -> Float32Array:
    """Logits as binary32, whatever type they travelled in.

    Raises:
        ProtocolError: its type is unknown, or its bytes do not fill its shape.
    """
    shape = tuple(tensor.shape)
    count = int(np.prod(shape))
    width = 4 if tensor.data_type == types_pb2.DATA_TYPE_FLOAT32 else 2
    if len(tensor.data) != count * width:
        raise ProtocolError(f"{what} holds {len(tensor.data)} bytes; its shape {shape} needs {count * width}")
    if tensor.data_type == types_pb2.DATA_TYPE_FLOAT32:
        return np.frombuffer(tensor.data, dtype="<f4").reshape(shape)
    if tensor.data_type == types_pb2.DATA_TYPE_FLOAT16:
        return np.frombuffer(tensor.data, dtype="<f2").astype(np.float32).reshape(shape)
    if tensor.data_type == types_pb2.DATA_TYPE_BFLOAT16:
        # bfloat16 is the upper half of binary32, which numpy has no name for.
        halves = np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(shape)
    raise ProtocolError(f"{what} has data type {tensor.data_type}; it must be float32, float16 or bfloat16")

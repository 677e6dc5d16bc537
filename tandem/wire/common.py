"""Messages that both internal protocols share."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import numpy as np

from tandem.config.rule import Rule, broken
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.sampling.ranges import sampling_rules
from tandem.types import (
    Delta,
    Float32Array,
    ModelInfo,
    RowKind,
    SamplingParams,
    StepProfile,
)
from tandem.v1 import types_pb2
from tandem.wire.columns import floats_to_bytes

EnumT = TypeVar("EnumT", bound=Enum)


def enum_words(kind: type[EnumT], words: Any, prefix: str) -> tuple[dict[EnumT, Any], dict[int, EnumT]]:
    """The protocol's value of each member of an enum, and the members by value.

    Args:
        kind: The enum.
        words: The protocol's enum, whose names are those of the members with a prefix.
        prefix: The prefix.
    """
    values = {member: words.Value(f"{prefix}_{member.name}") for member in kind}
    return values, {value: member for member, value in values.items()}


_ROW_KINDS, _ROW_KINDS_BACK = enum_words(RowKind, types_pb2.RowKind, "ROW_KIND")

_SAMPLING_RULES: tuple[Rule[SamplingParams], ...] = sampling_rules()


def row_kind_to_proto(kind: RowKind) -> types_pb2.RowKind.ValueType:
    """The protocol's word for a row kind."""
    value: types_pb2.RowKind.ValueType = _ROW_KINDS[kind]
    return value


def row_kind_from_proto(value: int) -> RowKind:
    """The row kind that a message names.

    Raises:
        InvalidRequestError: it names none.
    """
    try:
        return _ROW_KINDS_BACK[value]
    except KeyError:
        names = ", ".join(types_pb2.RowKind.Name(known) for known in _ROW_KINDS.values())
        raise InvalidRequestError(f"row_kind is {value}; it must be one of {names}") from None


def check_delta(delta: Delta) -> None:
    """Refuse a delta that no sequence has room for.

    Raises:
        InvalidRequestError: its base length is negative.
    """
    if delta.base_length < 0:
        raise InvalidRequestError(f"delta.base_length is {delta.base_length}; it must be at least 0")


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
        message.repetition_penalty,
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
        drafts_ahead=info.drafts_ahead,
        step_profile=[
            types_pb2.StepTime(sequence_count=sequences, token_count=tokens, seconds=seconds)
            for (sequences, tokens), seconds in info.step_profile.seconds.items()
        ],
        step_profile_version=info.step_profile.version,
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
        tensor_parallel_size=message.tensor_parallel_size,
        drafting_method=message.drafting_method,
        drafts_ahead=message.drafts_ahead,
        step_profile=StepProfile(
            {(step.sequence_count, step.token_count): step.seconds for step in message.step_profile},
            message.step_profile_version,
        ),
    )


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

"""Messages that both internal protocols share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from tandem.config.rule import Rule, broken, refuse
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.sampling.ranges import sampling_rules
from tandem.types import (
    Cancel,
    Coverage,
    Delta,
    Finish,
    Float32Array,
    Grammar,
    ModelInfo,
    RowKind,
    SamplingParams,
    StepProfile,
)
from tandem.v1 import types_pb2
from tandem.wire.columns import floats_to_bytes
from tandem.wire.mirror import Mirror, enum_codec, travels_by

StepT = TypeVar("StepT")

_SAMPLING_RULES: tuple[Rule[SamplingParams], ...] = sampling_rules()
_SAMPLING = Mirror(SamplingParams, types_pb2.SamplingParams)
sampling_to_proto = _SAMPLING.to_proto


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """The sampling parameters of a message."""
    sampling = _SAMPLING.from_proto(message)
    refuse(broken(_SAMPLING_RULES, sampling))
    return sampling


travels_by(SamplingParams, sampling_to_proto, sampling_from_proto)
Mirror(Grammar, types_pb2.Grammar)
_COVERAGE = Mirror(
    Coverage,
    types_pb2.VocabularyCoverage,
    shared_tokens="shared_token_count",
    draft_tokens="draft_token_count",
    target_tokens="target_token_count",
)
coverage_to_proto, coverage_from_proto = _COVERAGE.to_proto, _COVERAGE.from_proto


row_kind_to_proto, row_kind_from_proto = enum_codec(RowKind, types_pb2.RowKind.DESCRIPTOR, "row_kind")


def check_delta(delta: Delta) -> None:
    """Refuse a delta that no sequence has room for."""
    if delta.base_length < 0:
        raise InvalidRequestError(f"delta.base_length is {delta.base_length}; it must be at least 0")


def _profile_to_proto(profile: StepProfile) -> types_pb2.StepProfile:
    steps = (
        types_pb2.StepTime(sequence_count=sequences, token_count=tokens, seconds=seconds)
        for (sequences, tokens), seconds in profile.seconds.items()
    )
    return types_pb2.StepProfile(steps=steps, version=profile.version)


def _profile_from_proto(message: types_pb2.StepProfile) -> StepProfile:
    seconds = {(step.sequence_count, step.token_count): step.seconds for step in message.steps}
    return StepProfile(seconds, message.version)


travels_by(StepProfile, _profile_to_proto, _profile_from_proto)
_MODEL_INFO = Mirror(ModelInfo, types_pb2.ModelInfo)
model_info_to_proto, model_info_from_proto = _MODEL_INFO.to_proto, _MODEL_INFO.from_proto


def write_requests(
    message: Any, requests: Iterable[tuple[int, Any]], step: type[StepT], options: Mirror[Any, Any]
) -> list[tuple[int, StepT]]:
    """Write what opens and ends sequences, each by its number, to a message of either service, and return the steps.

    A sequence's Open comes before its steps, and these before its end.
    """
    steps: list[tuple[int, StepT]] = []
    for sequence, request in requests:
        if isinstance(request, step):
            steps.append((sequence, request))
        elif isinstance(request, Finish):
            message.finishes.add(sequence=sequence, token_count=request.token_count)
        elif isinstance(request, Cancel):
            message.cancelled_sequences.append(sequence)
        else:
            message.opens.add(sequence=sequence).MergeFrom(options.to_proto(request))
    return steps


def read_requests(
    message: Any, options: Callable[[Any], Any], steps: Callable[[Any], Iterable[tuple[int, Any]]]
) -> Iterator[tuple[int, Any]]:
    """The requests of a message of either service, by number of their sequence."""
    for opening in message.opens:
        try:
            yield opening.sequence, options(opening)
        except InvalidRequestError as error:
            yield opening.sequence, error
    if message.HasField("steps"):
        yield from steps(message.steps)
    for finish in message.finishes:
        yield finish.sequence, Finish(finish.token_count)
    for sequence in message.cancelled_sequences:
        yield sequence, Cancel()


def logits_to_tensor(logits: Float32Array) -> types_pb2.Tensor:
    """Logits of any shape as a binary32 tensor."""
    return types_pb2.Tensor(
        data_type=types_pb2.DATA_TYPE_FLOAT32, shape=logits.shape, data=floats_to_bytes(logits)
    )


def logits_from_tensor(tensor: types_pb2.Tensor, what: str) -> Float32Array:
    """Logits as binary32, whatever type they travelled in."""
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

"""Messages that both internal protocols share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, TypeVar

import numpy as np

from tandem.config.rule import Rule, broken, refuse
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.sampling.ranges import sampling_rules
from tandem.model.types import (
    Cancel,
    Coverage,
    Delta,
    Finish,
    Float32Array,
    Grammar,
    ModelInfo,
    ProposeStep,
    RowKind,
    SamplingDefaults,
    SamplingParams,
    StepProfile,
    VerifyStep,
)
from tandem.scopes import MAX_SCOPE_LENGTH
from tandem.v1 import types_pb2
from tandem.wire import columns
from tandem.wire.mirror import Mirror, enum_codec, travels_by

StepT = TypeVar("StepT", ProposeStep, VerifyStep)

_SAMPLING_RULES: tuple[Rule[SamplingParams], ...] = sampling_rules()
_SAMPLING = Mirror(SamplingParams, types_pb2.SamplingParams)
sampling_to_proto = _SAMPLING.to_proto


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """The sampling parameters of a message."""
    sampling = _SAMPLING.from_proto(message)
    refuse(broken(_SAMPLING_RULES, sampling))
    return sampling


travels_by(SamplingParams, sampling_to_proto, sampling_from_proto)
# Parts before the whole.
Mirror(SamplingDefaults, types_pb2.SamplingDefaults, max_new_tokens="max_new_token_count")
Mirror(Grammar, types_pb2.Grammar)
_COVERAGE = Mirror(Coverage, types_pb2.VocabularyCoverage)
coverage_to_proto, coverage_from_proto = _COVERAGE.to_proto, _COVERAGE.from_proto
row_kind_to_proto, row_kind_from_proto = enum_codec(RowKind, types_pb2.RowKind.DESCRIPTOR, "row_kind")


def _profile_to_proto(profile: StepProfile) -> types_pb2.StepProfile:
    steps = (
        types_pb2.StepTime(sequence_count=sequences, token_count=tokens, seconds=seconds)
        for (sequences, tokens), seconds in profile.seconds.items()
    )
    return types_pb2.StepProfile(steps=steps, version=profile.version)


def _profile_from_proto(message: types_pb2.StepProfile) -> StepProfile:
    columns.check_count(len(message.steps), "steps of a profile")
    seconds = {(step.sequence_count, step.token_count): step.seconds for step in message.steps}
    return StepProfile(seconds, message.version)


travels_by(StepProfile, _profile_to_proto, _profile_from_proto)
_MODEL_INFO = Mirror(ModelInfo, types_pb2.ModelInfo)
model_info_to_proto = _MODEL_INFO.to_proto


def model_info_from_proto(message: types_pb2.ModelInfo) -> ModelInfo:
    """The model of a service."""
    columns.check_count(len(message.eos_token_ids), "ids that end a text")
    return _MODEL_INFO.from_proto(message)


def write_requests(
    message: Any,
    requests: Iterable[tuple[int, Any]],
    options: Mirror[Any, Any],
    step: type[StepT],
    form: Struct,
    numbers: Callable[[StepT], Iterable[int]],
) -> list[StepT]:
    """Write what is asked of sequences, each by its number, to a message of either service, and return the steps.

    A sequence's Open comes before its steps, and these before its end. The record of a step has the form: sequence,
    base length, number of token ids, and the step's own numbers.
    """
    steps: list[StepT] = []
    records: list[bytes] = []
    token_ids: list[int] = []
    for sequence, request in requests:
        if isinstance(request, step):
            delta: Delta = request.delta
            records.append(form.pack(sequence, delta.base_length, len(delta.token_ids), *numbers(request)))
            token_ids += delta.token_ids
            steps.append(request)
        elif isinstance(request, Finish):
            message.finishes.add(sequence=sequence, token_count=request.token_count)
        elif isinstance(request, Cancel):
            message.cancelled_sequences.append(sequence)
        else:
            message.opens.add(sequence=sequence).MergeFrom(options.to_proto(request))
    if steps:
        message.steps.records = b"".join(records)
        message.steps.token_ids = columns.pack_ints(token_ids)
    return steps


def read_requests(
    message: Any, options: Callable[[Any], Any], records: Sequence[Any], step: Callable[..., Any]
) -> Iterator[tuple[int, Any]]:
    """The requests of a message of either service, by number of their sequence; an error in place of one that is out of
    range. `options` reads an Open, and `step` makes a step of its delta and its own numbers."""
    parts = len(message.opens) + len(records) + len(message.finishes) + len(message.cancelled_sequences)
    columns.check_count(parts, "parts")
    sizes = [record[2] for record in records]
    deltas = columns.split(message.steps.token_ids, sizes, "token ids", most=None)
    for opening in message.opens:
        try:
            if len(opening.scope) > MAX_SCOPE_LENGTH:
                raise InvalidRequestError(
                    f"scope has {len(opening.scope)} characters; it must have at most {MAX_SCOPE_LENGTH}"
                )
            yield opening.sequence, options(opening)
        except InvalidRequestError as error:
            yield opening.sequence, error
    for (sequence, base_length, _, *numbers), token_ids in zip(records, deltas, strict=True):
        try:
            made = step(Delta(base_length, token_ids), *numbers)
            if base_length < 0:
                raise InvalidRequestError(f"delta.base_length is {base_length}; it must be at least 0")
            yield sequence, made
        except InvalidRequestError as error:
            yield sequence, error
    for finish in message.finishes:
        yield finish.sequence, Finish(finish.token_count)
    for sequence in message.cancelled_sequences:
        yield sequence, Cancel()


def logits_to_tensor(logits: Float32Array) -> types_pb2.Tensor:
    """Rows of logits as a binary32 tensor, rows times vocabulary."""
    return types_pb2.Tensor(
        data_type=types_pb2.DATA_TYPE_FLOAT32, shape=logits.shape, data=columns.pack_floats(logits)
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
    shape, dtype = tuple(tensor.shape), np.dtype(form)
    size = shape[0] * shape[1] * dtype.itemsize
    if len(tensor.data) != size:
        raise ProtocolError(f"{what} holds {len(tensor.data)} bytes; its shape {shape} needs {size}")
    logits = np.frombuffer(tensor.data, dtype)
    if form == "<u2":
        logits = (logits.astype(np.uint32) << 16).view(np.float32)
    return logits.astype(np.float32, copy=False).reshape(shape)

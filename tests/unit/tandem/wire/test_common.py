"""Sampling parameters, model descriptions and tensors survive a trip over the wire; invalid ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.types import GenerationRequest, ModelInfo, SamplingParams
from tandem.v1 import types_pb2
from tandem.wire import common
from tandem.wire.generation import request_from_proto, request_to_proto

SAMPLING = SamplingParams(0.7, 20, 0.9, 0.05, -(2**62))


def test_sampling_survives_in_double_precision() -> None:
    """With binary32 the target would warp with another temperature than the coordinator."""
    assert common.sampling_from_proto(common.sampling_to_proto(SAMPLING)) == SAMPLING


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        (SamplingParams(5e-324), {"temperature"}),
        (SamplingParams(-1.0), {"temperature"}),
        (SamplingParams(float("nan")), {"temperature"}),
        (SamplingParams(float("inf")), {"temperature"}),
        (SamplingParams(top_k=-1), {"top_k"}),
        (SamplingParams(top_p=0.0), {"top_p"}),
        (SamplingParams(top_p=1.5, min_p=2.0), {"top_p", "min_p"}),
        (SamplingParams(repetition_penalty=-1.0), {"repetition_penalty"}),
        (
            SamplingParams(frequency_penalty=3.0, presence_penalty=-3.0),
            {"frequency_penalty", "presence_penalty"},
        ),
    ],
)
def test_sampling_out_of_range_is_refused_with_every_reason(
    sampling: SamplingParams, names: set[str]
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        common.sampling_from_proto(common.sampling_to_proto(sampling))
    assert {sentence.partition(" is ")[0] for sentence in str(refusal.value).split("; ")[::2]} == names


def test_a_model_s_description_survives() -> None:
    info = ModelInfo("m", "LlamaForCausalLM", 128, "abc", 1024, "float32", (0, 7), "0.1.0", 10**10)
    assert common.model_info_from_proto(common.model_info_to_proto(info)) == info


@pytest.mark.parametrize(
    ("data_type", "data"),
    [
        (types_pb2.DATA_TYPE_FLOAT16, np.array([1.5, -2.0], dtype="<f2").tobytes()),
        (types_pb2.DATA_TYPE_BFLOAT16, bytes.fromhex("c03f00c0")),
        (types_pb2.DATA_TYPE_FLOAT32, np.array([1.5, -2.0], dtype="<f4").tobytes()),
    ],
)
def test_logits_of_every_type(data_type: types_pb2.DataType.ValueType, data: bytes) -> None:
    tensor = types_pb2.Tensor(data_type=data_type, shape=[1, 2], data=data)
    assert common.logits_from_tensor(tensor, "rows").tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"1234"),
            "holds 4 bytes; its shape \\(2, 3\\) needs 24",
        ),
        (types_pb2.Tensor(shape=[1], data=b"12"), "has data type 0"),
    ],
)
def test_impossible_tensors_are_refused(tensor: types_pb2.Tensor, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        common.logits_from_tensor(tensor, "dense_rows")


PENALIZED = SamplingParams(repetition_penalty=1.3, frequency_penalty=-0.5, presence_penalty=2.0)


def test_penalties_survive() -> None:
    assert common.sampling_from_proto(common.sampling_to_proto(PENALIZED)) == PENALIZED


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest("x"),
        GenerationRequest("x", repetition_penalty=0.0, frequency_penalty=0.0, presence_penalty=0.0),
        GenerationRequest("x", repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
    ],
)
def test_penalties_of_requests_survive(request_: GenerationRequest) -> None:
    assert request_from_proto(request_to_proto(request_)) == request_

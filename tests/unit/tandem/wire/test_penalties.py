"""Penalties and the prompt's length survive the wire; fields that an older peer leaves out are off."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest, ModelInfo, SamplingParams, TargetOptions
from tandem.v1 import target_pb2, types_pb2
from tandem.wire import target as wire
from tandem.wire.common import (
    model_info_from_proto,
    model_info_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from tandem.wire.generation import request_from_proto, request_to_proto

SAMPLING = SamplingParams(repetition_penalty=1.3, frequency_penalty=-0.5, presence_penalty=2.0)


def test_sampling_parameters() -> None:
    assert sampling_from_proto(sampling_to_proto(SAMPLING)) == SAMPLING


def test_unset_penalties_are_off() -> None:
    sampling = sampling_from_proto(types_pb2.SamplingParams(temperature=1.0, top_p=1.0))
    assert sampling == SamplingParams()
    assert not sampling.penalizes


def test_target_options() -> None:
    options = TargetOptions("id", SAMPLING, 64, "", prompt_length=17)
    assert wire.options_from_proto(wire.options_to_proto(options).open) == options
    with pytest.raises(InvalidRequestError, match="prompt_token_count is -1; it must be at least 0"):
        wire.options_from_proto(
            target_pb2.VerifyOpen(sampling=sampling_to_proto(SAMPLING), prompt_token_count=-1)
        )


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest("x"),
        GenerationRequest("x", repetition_penalty=0.0, frequency_penalty=0.0, presence_penalty=0.0),
        GenerationRequest("x", repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
    ],
)
def test_requests(request_: GenerationRequest) -> None:
    assert request_from_proto(request_to_proto(request_)) == request_


def test_the_number_of_devices() -> None:
    info = ModelInfo("m", "a", 10, "", 64, "float32", tensor_parallel_size=4)
    assert model_info_from_proto(model_info_to_proto(info)) == info
    assert model_info_from_proto(types_pb2.ModelInfo()).tensor_parallel_size == 1

"""Logit adjustments survive the wire, and only a service that supports them announces the feature."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidRequestError
from tandem.types import LogitAdjustments, ModelFeature, ModelInfo, SamplingParams, TargetOptions
from tandem.v1 import target_pb2, types_pb2
from tandem.wire import target as wire
from tandem.wire.common import model_info_from_proto, model_info_to_proto, sampling_to_proto

INFO = ModelInfo("m", "a", 10, "", 64, "float32", features=frozenset(ModelFeature))


def opened(adjustments: target_pb2.LogitAdjustments) -> TargetOptions:
    sampling = sampling_to_proto(SamplingParams())
    return wire.options_from_proto(target_pb2.VerifyOpen(sampling=sampling, logit_adjustments=adjustments))


@pytest.mark.parametrize(
    "adjustments",
    [LogitAdjustments(), LogitAdjustments({3: 0.1, 5: -100.0}), LogitAdjustments({}, 4, (0, 7))],
)
def test_adjustments(adjustments: LogitAdjustments) -> None:
    options = TargetOptions("id", SamplingParams(), 64, "", 17, adjustments)
    message = wire.options_to_proto(options).open
    assert wire.options_from_proto(message) == options
    assert message.HasField("logit_adjustments") == bool(adjustments)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (target_pb2.LogitAdjustments(min_tokens=-1), "min_tokens is -1; it must be at least 0"),
        (
            target_pb2.LogitAdjustments(biases={3: 1e6}),
            "the bias of token 3 is 1e+06; it must be between -100 and 100",
        ),
        (
            target_pb2.LogitAdjustments(biases={3: float("nan")}),
            "the bias of token 3 is nan; it must be between -100 and 100",
        ),
    ],
)
def test_impossible_adjustments(message: target_pb2.LogitAdjustments, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        opened(message)
    assert str(refusal.value) == sentence


def test_features_are_announced() -> None:
    assert model_info_from_proto(model_info_to_proto(INFO)) == INFO
    assert model_info_from_proto(types_pb2.ModelInfo()).features == frozenset()


def test_features_of_a_later_version_are_not_asked_for() -> None:
    message = model_info_to_proto(INFO)
    message.features.append(99)  # type: ignore[arg-type]
    assert model_info_from_proto(message) == INFO

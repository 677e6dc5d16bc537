"""Everything but steps and answers survives a trip over the wire, in few bytes; invalid values are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from coordinator.transport.streams import RemoteSequence
from tandem.admin import ConfigOption, CoordinatorState, Diagnosis
from tandem.config.layers import Origin
from tandem.errors import InvalidRequestError, ProtocolError
from tandem.replica import ReplicaState, Role
from tandem.speculation_state import DecidingFigure, SpeculationState
from tandem.types import (
    AheadStats,
    Chunk,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    IntArray,
    ModelInfo,
    PositionStats,
    RowKind,
    SamplingParams,
    SpeculationStats,
    Summary,
    SupportRow,
    TargetRow,
    TokenLogprobs,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import generation_pb2, types_pb2
from tandem.wire import admin as wire
from tandem.wire import common, generation, target
from tests.unit.coordinator.cli.samples import FINDINGS, NOW, REPLICAS, REQUEST, STATS, STATUS

SAMPLING = SamplingParams(0.7, 20, 0.9, 0.05, -(2**62))
PENALIZED = SamplingParams(repetition_penalty=1.3, frequency_penalty=-0.5, presence_penalty=2.0)


@pytest.mark.parametrize("sampling", [SAMPLING, PENALIZED])
def test_sampling_survives_in_double_precision(sampling: SamplingParams) -> None:
    """With binary32 the target would warp with another temperature than the coordinator."""
    assert common.sampling_from_proto(common.sampling_to_proto(sampling)) == sampling


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
def test_sampling_out_of_range_is_refused_for_all_reasons(sampling: SamplingParams, names: set[str]) -> None:
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


YEARS = replace(STATS.speculation, rounds=1 << 40, drafted=1 << 42)
DOCUMENTS: list[tuple[Any, object]] = [
    *((wire.STATUS, replace(STATUS, state=state)) for state in CoordinatorState),
    *(
        (wire.REPLICA, replace(shot, role=role, state=state, model=None if state is ReplicaState.DOWN else shot.model))
        for shot, role, state in product(REPLICAS, Role, ReplicaState)
    ),
    (wire.REQUEST, REQUEST),
    (wire.STATS, replace(STATS, completion_tokens=1 << 43, speculation=YEARS)),
    *(
        (wire.OPTION, ConfigOption("name", value, origin, True, "10.0.0.7:1", NOW))
        for origin, value in product(Origin, (None, 6, 1.0, True, "strict", [0.9, 0.5]))
    ),
    (wire.DIAGNOSIS, Diagnosis("0.1.0", NOW, FINDINGS)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "document"), DOCUMENTS)
def test_what_administrators_see_comes_back(form: Any, document: object) -> None:
    back = form.from_proto(form.to_proto(document))
    assert back == document
    if isinstance(document, ConfigOption):
        assert type(back.value) is type(document.value)


VOCABULARY_SIZE = 128_256  # Llama 3
TOKEN_COUNT = 5
CONTEXT = list(range(100_000, 104_000))
MEAN_SUPPORT = 147
"""Ids of a support on average: what the 6 KB allow (docs/verification.md)."""


def round_bytes(row_kind: RowKind, rows: tuple[TargetRow, ...], supports: tuple[IntArray, ...] = ()) -> int:
    """Serialised request and response of one round in the middle of a long text, after a rejection."""
    remote = RemoteSequence()
    remote.delta_to(CONTEXT, range(120_000, 120_000 + TOKEN_COUNT))
    committed = [*CONTEXT, 120_000, 127_999]
    delta = remote.delta_to(committed, range(121_000, 121_000 + TOKEN_COUNT))
    step = VerifyStep(delta, row_kind, TOKEN_COUNT + 1, supports)
    request = target.requests_to_proto([(1, step)]).SerializeToString()
    response = target.answers_to_proto([(1, Verification(len(committed), rows))]).SerializeToString()
    return len(request) + len(response)


def test_token_rows_take_at_most_160_bytes() -> None:
    """`greedy` and `strict`."""
    assert round_bytes(RowKind.TOKEN, (TokenRow(VOCABULARY_SIZE - 1),) * (TOKEN_COUNT + 1)) <= 160


def test_support_rows_take_at_most_6_kilobytes() -> None:
    """`residual` and `block`, with supports of the usual size."""
    support = np.arange(VOCABULARY_SIZE - MEAN_SUPPORT, VOCABULARY_SIZE)
    row = SupportRow(support, np.full(MEAN_SUPPORT, 1 / VOCABULARY_SIZE), 0.9, 7)
    bonus = SupportRow(np.array([], dtype=np.int64), np.array([]), 1.0, VOCABULARY_SIZE - 1)
    size = round_bytes(RowKind.SUPPORT, (*[row] * TOKEN_COUNT, bonus), (support,) * TOKEN_COUNT)
    assert size <= 6 * 1024


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest("text"),
        GenerationRequest("x", repetition_penalty=0.0, frequency_penalty=0.0, presence_penalty=0.0),
        GenerationRequest("x", repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
        GenerationRequest(""),
        GenerationRequest(()),
        GenerationRequest(
            prompt=(1, 2),
            max_tokens=0,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            stop=("a", "b"),
            num_speculative_tokens=3,
            rejection_sampling_strategy="strict",
            speculation=False,
            row_kind=RowKind.DENSE,
            ignore_eos=True,
            logprobs=0,
        ),
        GenerationRequest(
            "x",
            logit_bias={3: -100.0, 0: 0.1},
            min_tokens=4,
            stop_token_ids=(7, 9),
            include_stop_str_in_output=True,
            max_tokens_must_fit=True,
            probabilities=True,
            grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}"),
        ),
    ],
)
def test_requests_distinguish_unset_from_zero(request_: GenerationRequest) -> None:
    assert generation.request_from_proto(generation.request_to_proto(request_)) == request_


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the request has no prompt; set text or token_ids"):
        generation.request_from_proto(generation_pb2.GenerateRequest())


@pytest.mark.parametrize("stop_reason", [None, "", "END", 0, 7])
@pytest.mark.parametrize("finish_reason", list(FinishReason))
def test_chunks_survive(finish_reason: FinishReason, stop_reason: str | int | None) -> None:
    positions = [PositionStats(2, 2, 2), PositionStats(2, 2, 1)]
    stats = SpeculationStats(2, 5, 3, positions, AheadStats(2, 1, [0, 1], 0.125))
    state = SpeculationState(False, 0, "why", (DecidingFigure("with the draft", 95.25, "tokens/s"),))
    summary = Summary(finish_reason, 4, 9, stats, "id", -5, state, stop_reason=stop_reason)
    chunk = Chunk(
        "héllo", (1, 2), (True, False), (2, 3), summary, 4,
        (TokenLogprobs(-0.5, (1, 7), (-0.5, -1.25)), TokenLogprobs(-2.0)), drafted_ahead=True,
        draft_probs=(0.5, 0.25), target_probs=(0.75, 1.0),
    )  # fmt: skip
    assert generation.chunk_from_proto(generation.chunk_to_proto(chunk)) == chunk
    assert generation.chunk_from_proto(generation.chunk_to_proto(Chunk("", (), (), ()))).summary is None

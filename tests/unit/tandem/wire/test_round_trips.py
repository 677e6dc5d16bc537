"""What goes over the wire comes back as it was, and nonsense is refused with a sentence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.speculation_state import DecidingFigure, SpeculationState
from tandem.types import (
    AheadStats,
    Chunk,
    Delta,
    DenseLogits,
    DenseRow,
    DraftOptions,
    FinishReason,
    GenerationRequest,
    IntArray,
    ModelInfo,
    PositionStats,
    Proposal,
    ProposeStep,
    RowKind,
    RowStatistics,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    Summary,
    SupportRow,
    TargetOptions,
    TokenLogprobs,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2
from tandem.wire import common, draft, generation, target

SAMPLING = SamplingParams(0.7, 20, 0.9, 0.05, -(2**62))


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_sampling_survives_in_double_precision() -> None:
    """binary32 would make the target warp with another temperature than the coordinator."""
    assert common.sampling_from_proto(common.sampling_to_proto(SAMPLING)) == SAMPLING


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        (
            SamplingParams(5e-324),
            "temperature is 4.94066e-324; it must be 0 (greedy) or a finite number >= 0.0001",
        ),
        (SamplingParams(-1.0), "temperature is -1; it must be 0 (greedy) or a finite number >= 0.0001"),
        (
            SamplingParams(float("nan")),
            "temperature is nan; it must be 0 (greedy) or a finite number >= 0.0001",
        ),
        (
            SamplingParams(float("inf")),
            "temperature is inf; it must be 0 (greedy) or a finite number >= 0.0001",
        ),
        (SamplingParams(top_k=-1), "top_k is -1; it must be an integer >= 0 (0 keeps all tokens)"),
        (SamplingParams(top_p=0.0), "top_p is 0; it must be in (0, 1]"),
        (
            SamplingParams(top_p=1.5, min_p=2.0),
            "top_p is 1.5; it must be in (0, 1]; min_p is 2; it must be in [0, 1]",
        ),
    ],
)
def test_sampling_out_of_range_is_refused_with_every_reason(sampling: SamplingParams, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        common.sampling_from_proto(common.sampling_to_proto(sampling))
    assert str(refusal.value) == sentence


def test_model_info() -> None:
    info = ModelInfo("m", "LlamaForCausalLM", 128, "abc", 1024, "float32", (0, 7), "0.1.0", 10**10)
    assert common.model_info_from_proto(common.model_info_to_proto(info)) == info


def test_draft_options_and_steps() -> None:
    options = DraftOptions("r", SAMPLING, 99, RowKind.SUPPORT, 32, True, "00-aa-bb-01")
    assert draft.options_from_proto(draft.options_to_proto(options).open) == options
    step = ProposeStep(Delta(3, [4, 5]), 6)
    assert draft.step_from_proto(draft.step_to_proto(step).step) == step
    assert draft.finish_to_proto().WhichOneof("message") == "finish"


def test_target_options_and_steps() -> None:
    options = TargetOptions("r", SAMPLING, 99, "00-aa-bb-01")
    assert target.options_from_proto(target.options_to_proto(options).open) == options
    step = VerifyStep(Delta(3, [4, 5]), RowKind.SUPPORT, 3, (ids(1, 2), ids()), True, True)
    back = target.step_from_proto(target.step_to_proto(step).step)
    assert (back.delta, back.row_kind, back.row_count) == (step.delta, RowKind.SUPPORT, 3)
    assert (back.with_statistics, back.raced_recovery) == (True, True)
    assert [support.tolist() for support in back.supports] == [[1, 2], []]
    assert target.finish_to_proto().WhichOneof("message") == "finish"


@given(st.lists(st.integers(0, 2**31 - 1), max_size=8))
def test_deterministic_proposals(token_ids: list[int]) -> None:
    back = draft.proposal_from_proto(draft.proposal_to_proto(Proposal(7, tuple(token_ids))))
    assert (back.base_length, back.token_ids, back.distributions) == (7, tuple(token_ids), ())
    assert back.token_logits is None


def test_proposals_with_distributions() -> None:
    sparse = SparseDistribution(ids(5, 9), np.array([0.75, 0.25]))
    dense = DenseLogits(np.array([0.5, -1.0, 3.0], dtype=np.float32))
    logits = np.array([1.5, -2.5], dtype=np.float32)
    back = draft.proposal_from_proto(draft.proposal_to_proto(Proposal(7, (5, 2), (sparse, dense), logits)))
    first, second = back.distributions
    assert isinstance(first, SparseDistribution)
    assert first.token_ids.tolist() == [5, 9]
    assert first.probs.tolist() == [0.75, 0.25]
    assert isinstance(second, DenseLogits)
    assert second.logits.tolist() == [0.5, -1.0, 3.0]
    assert back.token_logits is not None
    assert back.token_logits.tolist() == [1.5, -2.5]


def sparse_message(token_ids: list[int], probs: list[float]) -> draft_pb2.ProposeResponse:
    data = np.array(probs, dtype="<f4").tobytes()
    distribution = draft_pb2.SparseDistribution(token_ids=token_ids, probabilities=data)
    return draft_pb2.ProposeResponse(
        token_ids=[1], distributions=[draft_pb2.DraftDistribution(sparse=distribution)]
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (sparse_message([1, 2], [0.5, 0.2]), "sums to 0.7"),
        (sparse_message([1, 2], [1.5, -0.5]), "with nothing below 0"),
        (sparse_message([1, 2], [float("nan"), 0.5]), "sums to nan"),
        (sparse_message([1, 1], [0.5, 0.5]), "names a token twice"),
        (sparse_message([1, 2], [1.0]), "holds 4 bytes; it must hold 8 for 2 values"),
        (sparse_message([], []), "sums to 0"),
        (
            draft_pb2.ProposeResponse(token_ids=[1, 2], distributions=[draft_pb2.DraftDistribution()]),
            "a proposal of 2 tokens came with 1 distributions",
        ),
        (draft_pb2.ProposeResponse(token_ids=[1], token_logits=b"abc"), "token_logits holds 3 bytes"),
    ],
)
def test_impossible_proposals_are_refused(message: draft_pb2.ProposeResponse, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        draft.proposal_from_proto(message)


def verified(verification: Verification, step: VerifyStep) -> Verification:
    return target.verification_from_proto(target.verification_to_proto(verification), step)


def test_token_rows() -> None:
    step = VerifyStep(Delta(0, [1]), RowKind.TOKEN, 2)
    back = verified(Verification(4, (TokenRow(7), TokenRow(0))), step)
    assert (back.base_length, back.rows) == (4, (TokenRow(7), TokenRow(0)))


def test_support_rows() -> None:
    statistics = RowStatistics(0.5, 0.75, 3, ids(0, 2), np.array([2.5, -1.0], dtype=np.float32))
    rows = (
        SupportRow(ids(3, 8), np.array([0.75, 0.125]), 0.125, 5, statistics, 0.0625),
        SupportRow(ids(), np.array([]), 1.0, 9),
    )
    step = VerifyStep(Delta(0, [1]), RowKind.SUPPORT, 2, (ids(3, 8),), True)
    first, second = verified(Verification(4, rows), step).rows
    assert isinstance(first, SupportRow)
    assert (first.token_ids.tolist(), first.probs.tolist()) == ([3, 8], [0.75, 0.125])
    assert (first.outside_mass, first.outside_token_id, first.outside_prob) == (0.125, 5, 0.0625)
    assert first.statistics is not None
    assert (first.statistics.entropy, first.statistics.max_prob, first.statistics.argmax_token_id) == (
        0.5,
        0.75,
        3,
    )
    assert first.statistics.ranks.tolist() == [0, 2]
    assert first.statistics.logits.tolist() == [2.5, -1.0]
    assert isinstance(second, SupportRow)
    assert (len(second.token_ids), second.outside_mass, second.outside_token_id) == (0, 1.0, 9)
    assert second.statistics is None
    assert second.outside_prob is None


def test_an_outside_probability_of_zero_is_told() -> None:
    """It says that the target raced, and that nothing lies outside."""
    step = VerifyStep(Delta(0, [1]), RowKind.SUPPORT, 1, (ids(3),), raced_recovery=True)
    (row,) = verified(Verification(4, (SupportRow(ids(3), np.ones(1), 0.0, -1, None, 0.0),)), step).rows
    assert isinstance(row, SupportRow)
    assert row.outside_prob == 0.0


def test_dense_rows() -> None:
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    step = VerifyStep(Delta(0, [1]), RowKind.DENSE, 2)
    first, second = verified(Verification(4, (DenseRow(logits[0]), DenseRow(logits[1]))), step).rows
    assert isinstance(first, DenseRow)
    assert isinstance(second, DenseRow)
    assert np.array_equal([first.logits, second.logits], logits)


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
    ("message", "words"),
    [
        (target_pb2.VerifyResponse(), "0 rows came for 2"),
        (target_pb2.VerifyResponse(token_rows=target_pb2.TokenRows(token_ids=[1])), "1 rows came for 2"),
        (
            target_pb2.VerifyResponse(
                dense_rows=types_pb2.Tensor(data_type=types_pb2.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"1234")
            ),
            "dense_rows came where token rows were asked for",
        ),
    ],
)
def test_impossible_verifications_are_refused(message: target_pb2.VerifyResponse, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        target.verification_from_proto(message, VerifyStep(Delta(0, [1]), RowKind.TOKEN, 2))


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


@pytest.mark.parametrize(
    "step",
    [
        target_pb2.VerifyStep(row_count=-1, row_kind=types_pb2.ROW_KIND_TOKEN),
        target_pb2.VerifyStep(row_count=1),
        target_pb2.VerifyStep(row_kind=9, row_count=1),  # type: ignore[arg-type]
        target_pb2.VerifyStep(row_kind=types_pb2.ROW_KIND_TOKEN, delta=types_pb2.Delta(base_length=-1)),
        target_pb2.VerifyStep(row_kind=types_pb2.ROW_KIND_SUPPORT, supports=[target_pb2.Support()]),
    ],
)
def test_impossible_steps_are_refused(step: target_pb2.VerifyStep) -> None:
    with pytest.raises(InvalidRequestError):
        target.step_from_proto(step)


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest("text"),
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
        ),
    ],
)
def test_requests_keep_what_is_unset_apart_from_what_is_zero(request_: GenerationRequest) -> None:
    assert generation.request_from_proto(generation.request_to_proto(request_)) == request_


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the request has no prompt; set text or token_ids"):
        generation.request_from_proto(generation_pb2.GenerateRequest())


@pytest.mark.parametrize("stop_reason", [None, "", "END", 0, 7])
def test_what_ended_a_completion(stop_reason: str | int | None) -> None:
    summary = Summary(FinishReason.STOP, 4, 9, SpeculationStats(), "id", 1, stop_reason=stop_reason)
    chunk = Chunk("", (1,), (False,), (0,), summary)
    assert generation.chunk_from_proto(generation.chunk_to_proto(chunk)) == chunk


@pytest.mark.parametrize("finish_reason", list(FinishReason))
def test_chunks(finish_reason: FinishReason) -> None:
    positions = [PositionStats(2, 2, 2), PositionStats(2, 2, 1)]
    figures = SpeculationStats(2, 5, 3, positions, AheadStats(2, 1, [0, 1], 0.125))
    state = SpeculationState(False, 0, "why", (DecidingFigure("with the draft", 95.25, "tokens/s"),))
    summary = Summary(finish_reason, 4, 9, figures, "id", -5, state)
    chunk = Chunk(
        "héllo",
        (1, 2),
        (True, False),
        (2, 3),
        summary,
        4,
        (TokenLogprobs(-0.5, (1, 7), (-0.5, -1.25)), TokenLogprobs(-2.0)),
        drafted_ahead=True,
    )
    assert generation.chunk_from_proto(generation.chunk_to_proto(chunk)) == chunk
    assert generation.chunk_from_proto(generation.chunk_to_proto(Chunk("", (), (), ()))).summary is None

"""Requests and chunks survive a trip over the wire; a request without a prompt is refused."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidRequestError
from tandem.speculation_state import DecidingFigure, SpeculationState
from tandem.types import (
    AheadStats,
    Chunk,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    PositionStats,
    RowKind,
    SpeculationStats,
    Summary,
    TokenLogprobs,
)
from tandem.v1 import generation_pb2
from tandem.wire import generation


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
def test_the_reason_for_the_end_survives(stop_reason: str | int | None) -> None:
    summary = Summary(FinishReason.STOP, 4, 9, SpeculationStats(), "id", 1, stop_reason=stop_reason)
    chunk = Chunk("", (1,), (False,), (0,), summary)
    assert generation.chunk_from_proto(generation.chunk_to_proto(chunk)) == chunk


@pytest.mark.parametrize("finish_reason", list(FinishReason))
def test_chunks_survive(finish_reason: FinishReason) -> None:
    positions = [PositionStats(2, 2, 2), PositionStats(2, 2, 1)]
    stats = SpeculationStats(2, 5, 3, positions, AheadStats(2, 1, [0, 1], 0.125))
    state = SpeculationState(False, 0, "why", (DecidingFigure("with the draft", 95.25, "tokens/s"),))
    summary = Summary(finish_reason, 4, 9, stats, "id", -5, state)
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

"""Rows drawn by graphs are those drawn without. The capture here runs the work itself: all but CUDA is tested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tandem.engine.backends.cuda_graphs.capture import Work, joined, without_capture
from tandem.engine.core.jobs import Failed
from tandem.types import Delta, GraphCaptures, RowKind, SamplingParams, Verification, VerifyStep
from target_service.captured_rows import CapturedRows
from target_service.row_requests import RowRequest
from target_service.rows import verifications
from target_service.verifier import verify_head
from tests.unit.target_service.mixes import CPU, VOCABULARY_SIZE, Asked, asked_mixes, some_logits, to_requests

GREEDY, PLAIN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=4)
TRUNCATED = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=4)
SUPPORTS = (np.array([3, 9]), np.array([7]))


@pytest.fixture(scope="module")
def graphs() -> CapturedRows:
    made = CapturedRows(without_capture, VOCABULARY_SIZE, CPU)
    assert [outcome.reason for outcome in made.outcomes] == [None] * 9
    return made


def exactly(answers: list[Verification | None] | None) -> list[str]:
    """Every bit of them, as text."""
    assert answers is not None
    with np.printoptions(floatmode="unique", threshold=1 << 30):
        return [repr(answer) for answer in answers]


@settings(max_examples=100, deadline=None)
@given(asked=asked_mixes())
def test_graphs_draw_the_same_rows_or_none(graphs: CapturedRows, asked: Asked) -> None:
    """Logits of earlier steps stay behind those of a step, and NaN among them reaches nobody."""
    logits = some_logits(asked)
    requests = to_requests(asked, CPU)
    graphs._logits.fill_(torch.nan)
    with torch.inference_mode():
        found = graphs.verifications(requests, logits)
        expected = verifications(requests, logits)
    is_drawn = all(
        each.step.row_kind is RowKind.TOKEN
        or (each.step.row_kind is RowKind.SUPPORT and not each.step.with_statistics)
        for each in requests
    )
    assert (found is not None) == (is_drawn and len(logits) <= 32)
    if found is not None:
        assert exactly(found) == exactly(expected)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, TRUNCATED], ids=["greedy", "plain", "truncated"])
@pytest.mark.parametrize("kind", [RowKind.TOKEN, RowKind.SUPPORT])
def test_non_finite_logits_end_their_own_request_alone(
    graphs: CapturedRows, kind: RowKind, sampling: SamplingParams, number: float
) -> None:
    supports = SUPPORTS if kind is RowKind.SUPPORT else ()
    requests = [RowRequest(VerifyStep(Delta(4, [1] * 3), kind, 3, supports), sampling)] * 3
    logits = torch.randn(9, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = exactly(graphs.verifications(requests, logits))
        logits[4] = number
        after = exactly(graphs.verifications(requests, logits))
    assert after == [before[0], "None", before[2]]


class Replaying:
    """A capture that counts its replays, and may spoil them."""

    def __init__(self, spoilt: bool = False) -> None:
        self.spoilt = spoilt
        self.replayed: list[int] = []

    def __call__(self, work: Work) -> Work:
        def replay() -> torch.Tensor:
            found = work()
            self.replayed.append(len(found))
            return found + 1 if self.spoilt else found

        return replay


@pytest.mark.parametrize(("row_count", "replayed"), [(1, [1]), (3, [8]), (8, [8]), (9, [32]), (33, [])])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, TRUNCATED], ids=["greedy", "plain", "truncated"])
def test_the_smallest_graph_that_fits_is_replayed(
    sampling: SamplingParams, row_count: int, replayed: list[int]
) -> None:
    capture = Replaying()
    graphs = CapturedRows(capture, VOCABULARY_SIZE, CPU)
    capture.replayed.clear()
    request = RowRequest(VerifyStep(Delta(4, [1]), RowKind.TOKEN, 1), sampling)
    with torch.inference_mode():
        graphs.verifications([request] * row_count, torch.zeros(row_count, VOCABULARY_SIZE))
    assert capture.replayed == replayed


def test_graphs_with_wrong_results_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    graphs = CapturedRows(Replaying(spoilt=True), VOCABULARY_SIZE, CPU)
    assert all(outcome.reason is not None for outcome in graphs.outcomes)
    request = RowRequest(VerifyStep(Delta(4, [1]), RowKind.TOKEN, 1), GREEDY)
    assert graphs.verifications([request], torch.zeros(1, VOCABULARY_SIZE)) is None
    assert "some rows could not be captured" in caplog.text


def test_supports_longer_than_a_graph_holds_are_drawn_without(graphs: CapturedRows) -> None:
    long = CapturedRows(without_capture, 2000, CPU)
    step = VerifyStep(Delta(4, [1]), RowKind.SUPPORT, 1, (np.arange(513),))
    assert long.verifications([RowRequest(step, PLAIN)], torch.zeros(1, 2000)) is None


@pytest.mark.parametrize("kind", [RowKind.SUPPORT, RowKind.DENSE])
def test_the_head_draws_by_graphs_where_they_serve(graphs: CapturedRows, kind: RowKind) -> None:
    """Dense rows are the logits themselves, which no graph draws."""
    supports = SUPPORTS if kind is RowKind.SUPPORT else ()
    request = RowRequest(VerifyStep(Delta(4, [1] * 3), kind, 3, supports), PLAIN)
    jobs: list[Any] = [SimpleNamespace(payload=request, sequence=None)]
    logits = torch.randn(3, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for number in (torch.nan, 0.0):
            logits[1, 0] = number
            found, expected = verify_head(jobs, logits, graphs=graphs), verify_head(jobs, logits)
            assert repr(found) == repr(expected)
            assert isinstance(found[0], Failed) == np.isnan(number)


def test_captures_of_a_services_parts_are_told_as_one() -> None:
    steps, rows = GraphCaptures(3, ("steps 4 x 1: no memory",), 5), GraphCaptures(2, (), 7)
    assert joined(steps, None, rows) == GraphCaptures(5, ("steps 4 x 1: no memory",), 12)
    assert joined(None, None) is None

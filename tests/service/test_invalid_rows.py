"""Rows that no model can produce cost the replica, not the request."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from tandem.engine.models.loading import LoadedModel
from tandem.errors import ProtocolError
from tandem.types import GenerationRequest, RowKind
from tandem.v1 import target_pb2
from tests.service.clients import complete
from tests.service.engines import Fault, Faults, tiny_model
from tests.service.target_faults import BOUND_SECONDS, REQUESTS, cluster, drop_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2)


def set_argmax(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.statistics.argmax_token_id = 1_000_000


def drop_statistics(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.ClearField("statistics")


def set_probabilities(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.outside_mass = math.nan
        row.probabilities = np.full(len(row.probabilities) // 4, np.nan, dtype="<f4").tobytes()


def set_outside_probability(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.outside_probability = 2.0


def widen(response: target_pb2.VerifyResponse) -> None:
    """Double the vocabulary, with the most likely token beyond the end of the real one."""
    tensor = response.dense_rows
    rows, width = tensor.shape
    wide = np.zeros((rows, 2 * width), dtype="<f4")
    wide[:, -1] = 100.0
    tensor.shape[1], tensor.data = 2 * width, wide.tobytes()


def set_logits(response: target_pb2.VerifyResponse) -> None:
    response.dense_rows.data = np.full(len(response.dense_rows.data) // 4, np.nan, dtype="<f4").tobytes()


def flatten(response: target_pb2.VerifyResponse) -> None:
    """Send a tensor without dimensions: one number."""
    response.dense_rows.ClearField("shape")
    response.dense_rows.data = bytes(4)


SUPPORT_ROWS = replace(REQUESTS["greedy"], row_kind=RowKind.SUPPORT)


TYPICAL = replace(REQUESTS["residual"], rejection_sampling_strategy="typical-acceptance")


DENSE_GREEDY, DENSE_SAMPLED = (replace(REQUESTS[name], logprobs=2) for name in ("greedy", "residual"))


INVALID_ROWS: dict[str, tuple[GenerationRequest, Fault]] = {
    "an unknown argmax token": (SUPPORT_ROWS, set_argmax),
    "no statistics": (TYPICAL, drop_statistics),
    "NaN probabilities": (REQUESTS["residual"], set_probabilities),
    "a token more likely than all tokens outside": (REQUESTS["residual"], set_outside_probability),
    "greedy rows of another vocabulary": (DENSE_GREEDY, widen),
    "sampled rows of another vocabulary": (DENSE_SAMPLED, widen),
    "NaN greedy logits": (DENSE_GREEDY, set_logits),
    "NaN sampled logits": (DENSE_SAMPLED, set_logits),
    "a scalar in place of rows": (DENSE_GREEDY, flatten),
}


@pytest.mark.parametrize("kind", INVALID_ROWS)
async def test_invalid_rows_cost_the_replica_its_place_and_the_request_nothing(
    kind: str, model: LoadedModel, other_model: LoadedModel
) -> None:
    request, fault = INVALID_ROWS[kind]
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, Faults(), Faults()) as two:
        undisturbed = await complete(two.client, request)
        for each in two.faults:
            each.steps, each.opened = 0, 0
        # The first answers that hold more than the bonus row.
        two.faults[0].garbled[2] = two.faults[1].garbled[2] = fault
        completed = await complete(two.client, request)
        assert two.opened == 3, "one stream to begin with, and one for each loss"
    assert completed.token_ids == undisturbed.token_ids
    assert completed.drafted == undisturbed.drafted


async def test_invalid_rows_from_the_only_target_are_an_error(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    faults = Faults(garbled=dict.fromkeys(range(1, 9), drop_rows))
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, faults) as one:
        with pytest.raises(ProtocolError):
            await complete(one.client, REQUESTS["greedy"])
        assert faults.opened == 1

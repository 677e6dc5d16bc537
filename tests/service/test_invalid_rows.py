"""Rows that no model can produce cost the replica, not the request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tandem.engine.models.loading import LoadedModel
from tandem.errors import ProtocolError
from tandem.types import GenerationRequest, RowKind
from tandem.v1 import target_pb2
from tests.service.clients import complete
from tests.service.engines import Fault, Faults, tiny_model
from tests.service.target_faults import BOUND_SECONDS, REQUESTS, cluster, drop_rows, without_columns


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2)


def filled(column: bytes, value: float, dtype: str = "<f4") -> bytes:
    """A column of the same length that holds one value."""
    return np.full(len(column) // 4, value, dtype).tobytes()


def set_argmax(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.statistics.argmax_token_id = 1_000_000
    columns = response.columns
    columns.argmax_token_ids = filled(columns.argmax_token_ids, 1_000_000, "<i4")


def drop_statistics(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.ClearField("statistics")
    for name in ("entropies", "max_probabilities", "argmax_token_ids", "ranks", "logits"):
        response.columns.ClearField(name)


def set_probabilities(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.outside_mass = math.nan
        row.probabilities = filled(row.probabilities, math.nan)
    columns = response.columns
    columns.probabilities = filled(columns.probabilities, math.nan)
    columns.outside_masses = filled(columns.outside_masses, math.nan)


def set_outside_probability(response: target_pb2.VerifyResponse) -> None:
    for row in response.support_rows.rows:
        row.outside_probability = 2.0
    columns = response.columns
    columns.outside_probabilities = filled(columns.outside_probabilities, 2.0)


def cut_column(response: target_pb2.VerifyResponse) -> None:
    """One byte too few: of a message for several sequences nobody can say whose it was."""
    for row in response.support_rows.rows:
        row.probabilities = row.probabilities[:-1]
    response.columns.probabilities = response.columns.probabilities[:-1]


def shorten_supports(response: target_pb2.VerifyResponse) -> None:
    """Columns that fit together, about other supports than those asked for."""
    for row in response.support_rows.rows:
        row.probabilities = row.probabilities[4:]
    columns = response.columns
    sizes = np.frombuffer(columns.support_sizes, "<i4")
    columns.support_sizes = np.maximum(sizes - 1, 0).astype("<i4").tobytes()
    columns.probabilities = columns.probabilities[4 * np.count_nonzero(sizes) :]


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
    "cut bytes": (REQUESTS["residual"], cut_column),
    "other supports": (REQUESTS["residual"], shorten_supports),
    "greedy rows of another vocabulary": (DENSE_GREEDY, widen),
    "sampled rows of another vocabulary": (DENSE_SAMPLED, widen),
    "NaN greedy logits": (DENSE_GREEDY, set_logits),
    "NaN sampled logits": (DENSE_SAMPLED, set_logits),
    "a scalar in place of rows": (DENSE_GREEDY, flatten),
}


@pytest.mark.parametrize("on_request", [lambda _: None, without_columns], ids=["columns", "rows"])
@pytest.mark.parametrize("kind", INVALID_ROWS)
async def test_invalid_rows_cost_the_replica_its_place_and_the_request_nothing(
    kind: str,
    on_request: Callable[[target_pb2.VerifyRequest], None],
    model: LoadedModel,
    other_model: LoadedModel,
) -> None:
    request, fault = INVALID_ROWS[kind]
    faults = Faults(on_request=on_request), Faults(on_request=on_request)
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faults) as two:
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


async def test_columns_that_do_not_fit_together_end_their_stream_and_no_request(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    """Of a block for several sequences nobody can say whose columns are cut, so all of them go elsewhere."""
    requests = [replace(REQUESTS["residual"], seed=seed) for seed in range(8)]
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, Faults(), Faults()) as two:

        async def at_once() -> list[tuple[int, ...]]:
            found = await asyncio.gather(*(complete(two.client, request) for request in requests))
            return [each.token_ids for each in found]

        undisturbed = await at_once()
        opened = two.opened
        two.faults[0].garbled = dict.fromkeys(range(two.faults[0].steps + 10, 10_000), cut_column)
        assert await at_once() == undisturbed
        assert two.faults[0].running == 0
        assert two.opened > opened + len(requests), "sequences of the broken stream were opened again"

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
from tandem.types import DenseRow, Float32Array, GenerationRequest, RowKind, SupportRow
from tests.service.clients import complete
from tests.service.engines import Fault, Faults, tiny_model
from tests.service.target_faults import BOUND_SECONDS, REQUESTS, cluster, drop_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2)


def supports(change: Callable[[SupportRow], SupportRow]) -> Fault:
    """Change every support row."""
    return lambda verification: replace(
        verification,
        rows=tuple(change(row) if isinstance(row, SupportRow) else row for row in verification.rows),
    )


def dense(change: Callable[[Float32Array], Float32Array]) -> Fault:
    """Change every dense row."""
    return lambda verification: replace(
        verification,
        rows=tuple(DenseRow(change(row.logits)) for row in verification.rows if isinstance(row, DenseRow)),
    )


def with_argmax(row: SupportRow) -> SupportRow:
    statistics = row.statistics
    return (
        row if statistics is None else replace(row, statistics=replace(statistics, argmax_token_id=1_000_000))
    )


def widened(logits: Float32Array) -> Float32Array:
    """Double the vocabulary, with the most likely token beyond the end of the real one."""
    wide = np.zeros(2 * logits.size, np.float32)
    wide[-1] = 100.0
    return wide


set_argmax = supports(with_argmax)
drop_statistics = supports(lambda row: replace(row, statistics=None))
set_probabilities = supports(
    lambda row: replace(row, probs=np.full(row.probs.size, np.nan), outside_mass=math.nan)
)
set_outside_probability = supports(lambda row: replace(row, outside_prob=2.0))
shorten_supports = supports(lambda row: replace(row, probs=row.probs[1:]))
widen = dense(widened)
set_logits = dense(lambda logits: np.full_like(logits, np.nan))
flatten = dense(lambda logits: logits[:1])


SUPPORT_ROWS = replace(REQUESTS["greedy"], row_kind=RowKind.SUPPORT)


TYPICAL = replace(REQUESTS["residual"], rejection_sampling_strategy="typical-acceptance")


DENSE_GREEDY, DENSE_SAMPLED = (replace(REQUESTS[name], logprobs=2) for name in ("greedy", "residual"))


INVALID_ROWS: dict[str, tuple[GenerationRequest, Fault]] = {
    "an unknown argmax token": (SUPPORT_ROWS, set_argmax),
    "no statistics": (TYPICAL, drop_statistics),
    "NaN probabilities": (REQUESTS["residual"], set_probabilities),
    "a token more likely than all tokens outside": (REQUESTS["residual"], set_outside_probability),
    "other supports": (REQUESTS["residual"], shorten_supports),
    "greedy rows of another vocabulary": (DENSE_GREEDY, widen),
    "sampled rows of another vocabulary": (DENSE_SAMPLED, widen),
    "NaN greedy logits": (DENSE_GREEDY, set_logits),
    "NaN sampled logits": (DENSE_SAMPLED, set_logits),
    "rows of one logit": (DENSE_GREEDY, flatten),
}


@pytest.mark.parametrize("kind", INVALID_ROWS)
async def test_invalid_rows_cost_the_replica_its_place_and_the_request_nothing(
    kind: str, model: LoadedModel, other_model: LoadedModel
) -> None:
    request, fault = INVALID_ROWS[kind]
    faults = Faults(), Faults()
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faults) as two:
        undisturbed = await complete(two.client, request)
        for each in two.faults:
            each.steps, each.opened = 0, 0
        # The first answers that hold more than the bonus row.
        two.faults[0].garbled[2] = two.faults[1].garbled[2] = fault
        completed = await complete(two.client, request)
        assert two.opened == 3, "one sequence to begin with, and one for each loss"
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
        two.faults[0].mangled_from = two.faults[0].steps + 10
        assert await at_once() == undisturbed
        assert two.faults[0].running == 0
        assert two.opened > opened + len(requests), "sequences of the broken stream were opened again"

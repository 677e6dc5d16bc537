"""A lost target costs a pause: the text is the same, token for token, wherever in a round the loss occurs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from coordinator.failover.verifier import MAX_LOSSES
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.errors import CapacityError, InvalidRequestError, ProtocolError, ServiceUnavailableError
from tandem.replica import Role
from tandem.types import Chunk, DenseRow, TokenRow, Verification
from tests.service.clients import Completed, complete, until
from tests.service.engines import Faults, target, tiny_model
from tests.service.fakes import coordinating
from tests.service.target_faults import BOUND_SECONDS, REQUESTS, cluster, drop_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2)


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel, other_model: LoadedModel) -> dict[str, Completed]:
    async def complete_all() -> dict[str, Completed]:
        async with cluster(model, other_model, Faults()) as one:
            return {name: await complete(one.client, request) for name, request in REQUESTS.items()}

    return asyncio.run(complete_all())


def shift_base(verification: Verification) -> Verification:
    return replace(verification, base_length=verification.base_length + 1)


def set_unknown_ids(verification: Verification) -> Verification:
    rows = (
        TokenRow(1 << 20) if isinstance(row, TokenRow) else replace(row, outside_token_id=1 << 20)
        for row in verification.rows
        if not isinstance(row, DenseRow)
    )
    return replace(verification, rows=tuple(rows))


LOSSES: dict[str, Callable[[int], Faults]] = {
    "before the step is computed": lambda step: Faults(before={step}),
    "before its answer leaves": lambda step: Faults(after={step}),
    "by a stream that ends without an error": lambda step: Faults(leaving={step}),
    "with an answer for another length": lambda step: Faults(garbled={step: shift_base}),
    "with an answer of unknown tokens": lambda step: Faults(garbled={step: set_unknown_ids}),
    "with an answer without rows": lambda step: Faults(garbled={step: drop_rows}),
}


@pytest.mark.parametrize("rule", REQUESTS)
@pytest.mark.parametrize("loss", LOSSES)
async def test_the_text_survives_a_loss_at_any_point_of_a_round(
    loss: str, rule: str, model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    """The first target fails at its first or third step, and the second one at its fourth."""
    for step in (1, 3):
        faulty = (LOSSES[loss](step), LOSSES[loss](4))
        async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faulty) as two:
            completed = await complete(two.client, REQUESTS[rule])
            assert two.opened == 3, "one sequence to begin with, and one for each loss"
        assert completed.token_ids == undisturbed[rule].token_ids
        assert completed.text == undisturbed[rule].text
        assert completed.drafted == undisturbed[rule].drafted
        assert completed.stats == undisturbed[rule].stats


async def test_the_only_target_is_used_again_after_a_loss(
    model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    faults = Faults(before={3}, after={5})
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, faults) as one:
        completed = await complete(one.client, REQUESTS["greedy"])
    assert completed.text == undisturbed["greedy"].text
    assert faults.opened == 3


async def test_without_any_target_the_error_says_how_many_tokens_were_delivered(
    model: LoadedModel, other_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        address, server = await stack.enter_async_context(target(model, Faults()))
        settings = CoordinatorSettings(target_address=address, target_wait_seconds=0.5)
        client = await stack.enter_async_context(
            Client(await stack.enter_async_context(coordinating(settings)))
        )
        chunks = client.generate(REQUESTS["greedy"])
        delivered = list((await anext(chunks)).token_ids)
        await server.stop(None)
        with pytest.raises(ServiceUnavailableError, match="no target service was ready within") as raised:
            await _read(chunks, delivered)
        assert f"{len(delivered)} token" in str(raised.value)
        assert address not in str(raised.value), "clients learn nothing about internals"
        assert f"{address} is down" in "".join(str(vars(record).get("replicas")) for record in caplog.records)
        with pytest.raises(ServiceUnavailableError, match="0 tokens had been delivered"):
            await complete(client, REQUESTS["greedy"])


async def _read(chunks: AsyncIterator[Chunk], token_ids: list[int]) -> None:
    async for chunk in chunks:
        token_ids += chunk.token_ids


async def test_a_request_that_crashes_targets_does_not_reach_all_of_them(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    """Every target fails on this request; without a bound it would take down one after another."""
    faults = tuple(Faults(after=set(range(1, 100))) for _ in range(MAX_LOSSES + 2))
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faults) as many:
        with pytest.raises(ProtocolError, match=f"{MAX_LOSSES} targets were lost"):
            await complete(many.client, REQUESTS["greedy"])
        assert many.opened == MAX_LOSSES


async def test_an_invalid_request_is_not_retried(model: LoadedModel, other_model: LoadedModel) -> None:
    faults = (
        Faults(before={1}, code=grpc.StatusCode.INVALID_ARGUMENT),
        Faults(before={1}, code=grpc.StatusCode.INVALID_ARGUMENT),
    )
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faults) as two:
        with pytest.raises(InvalidRequestError):
            await complete(two.client, REQUESTS["greedy"])
        assert two.opened == 1


async def test_a_request_goes_to_another_target_when_one_is_full(
    model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    full, free = Faults(full=True), Faults()
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, full, free) as two:
        assert (await complete(two.client, REQUESTS["strict"])).text == undisturbed["strict"].text
        free.full = True
        with pytest.raises(CapacityError):
            await complete(two.client, REQUESTS["strict"])


async def test_a_started_request_waits_for_room(
    model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    faults = Faults(after={3})

    def fill(verification: Verification) -> Verification:
        faults.full = True
        return verification

    faults.garbled[2] = fill
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, faults) as one:
        task = asyncio.create_task(complete(one.client, REQUESTS["greedy"]))
        await until(lambda: faults.steps == 3, BOUND_SECONDS)
        await asyncio.sleep(1.0)
        assert not task.done()
        faults.full = False
        assert (await task).text == undisturbed["greedy"].text


async def test_after_losses_no_stream_stays_open_and_each_round_counts_once(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    faults = (Faults(after={2}), Faults(before={2}))
    async with cluster(model, other_model, *faults) as two:
        completed = await complete(two.client, REQUESTS["residual"])
        await until(lambda: not any(each.running for each in faults), BOUND_SECONDS)
        snapshots = two.service.replicas.snapshots()
        await until(lambda: not any(each.open_sequences for each in two.service.replicas.snapshots()), 5.0)
        targets = [each.figures for each in snapshots if each.role is Role.TARGET]
        drafts = [each.figures for each in snapshots if each.role is Role.DRAFT]
    assert sum(each.rounds for each in targets) == completed.stats.rounds
    for stats in (targets, drafts):
        assert sum(each.drafted for each in stats) == completed.stats.drafted
        assert sum(each.accepted for each in stats) == completed.stats.accepted

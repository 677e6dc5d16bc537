"""A target that is lost costs a pause: the text is the same, to the token, wherever in a round it was lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import numpy as np
import pytest

from coordinator.failover.verifier import MAX_LOSSES
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.clients.aio import Client
from tandem.engine.models.loading import LoadedModel
from tandem.errors import CapacityError, InvalidRequestError, ProtocolError, ServiceUnavailableError
from tandem.replica import Role
from tandem.types import Chunk, GenerationRequest, RowKind
from tandem.v1 import target_pb2
from tests.service.clients import Completed, complete, until
from tests.service.engines import Fault, Faults, draft, target, tiny_model
from tests.service.fakes import coordinating, coordinator

PATIENCE_SECONDS = 30.0
"""So long that no hiccup of the machine makes a draft late: rounds begin where they did in the undisturbed run."""
BOUND_SECONDS = 30.0

REQUESTS = {
    "greedy": GenerationRequest("def f(", max_tokens=24, temperature=0.0, num_speculative_tokens=3, ignore_eos=True),
    "strict": GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, seed=5, rejection_sampling_strategy="strict",
        num_speculative_tokens=3, ignore_eos=True,
    ),
    "residual": GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, seed=6, rejection_sampling_strategy="residual",
        num_speculative_tokens=3, ignore_eos=True,
    ),
    "block": GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, seed=7, rejection_sampling_strategy="block",
        num_speculative_tokens=3, ignore_eos=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2)


@dataclass(frozen=True)
class Two:
    """A coordinator over two targets, or as many as there are faults."""

    client: Client
    service: CoordinatorService
    faults: tuple[Faults, ...]

    @property
    def opened(self) -> int:
        return sum(faults.opened for faults in self.faults)


@asynccontextmanager
async def cluster(
    model: LoadedModel, other_model: LoadedModel, *faults: Faults, wait_seconds: float = 10.0
) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        addresses = [(await stack.enter_async_context(target(model, each)))[0] for each in faults]
        drafting, _ = await stack.enter_async_context(draft(other_model))
        settings = CoordinatorSettings(
            target_address=",".join(addresses),
            draft_address=drafting,
            draft_patience_seconds=PATIENCE_SECONDS,
            target_wait_seconds=wait_seconds,
            speculation_policy="fixed",
            draft_ahead="off",  # how far a draft gets is a matter of time, and rounds are compared here
        )
        address, service = await stack.enter_async_context(coordinator(settings))
        yield Two(await stack.enter_async_context(Client(address)), service, faults)


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel, other_model: LoadedModel) -> dict[str, Completed]:
    async def all_of_them() -> dict[str, Completed]:
        async with cluster(model, other_model, Faults()) as one:
            return {name: await complete(one.client, request) for name, request in REQUESTS.items()}

    return asyncio.run(all_of_them())


def set_base(response: target_pb2.VerifyResponse) -> None:
    response.base_length += 1


def drop_rows(response: target_pb2.VerifyResponse) -> None:
    response.ClearField("token_rows")
    response.ClearField("support_rows")


def set_ids(response: target_pb2.VerifyResponse) -> None:
    if response.HasField("token_rows"):
        response.token_rows.token_ids[0] = 1 << 20
    for row in response.support_rows.rows:
        row.outside_token_id = 1 << 20


WAYS: dict[str, Callable[[int], Faults]] = {
    "before the step is computed": lambda step: Faults(before={step}),
    "before its answer leaves": lambda step: Faults(after={step}),
    "as if all were well": lambda step: Faults(leaving={step}),
    "with an answer to something else": lambda step: Faults(garbled={step: set_base}),
    "with an answer of unknown tokens": lambda step: Faults(garbled={step: set_ids}),
    "with an answer without rows": lambda step: Faults(garbled={step: drop_rows}),
}


@pytest.mark.parametrize("rule", REQUESTS)
@pytest.mark.parametrize("way", WAYS)
async def test_the_text_is_what_it_would_have_been(
    way: str, rule: str, model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    """The first target is lost at its first step, later at its third; what the second one said is lost once, too."""
    for step in (1, 3):
        faulty = (WAYS[way](step), WAYS[way](4))
        async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faulty) as two:
            completed = await complete(two.client, REQUESTS[rule])
            assert two.opened == 3, "one stream to begin with, and one for each loss"
        assert completed.token_ids == undisturbed[rule].token_ids
        assert completed.text == undisturbed[rule].text
        assert completed.drafted == undisturbed[rule].drafted
        assert completed.stats == undisturbed[rule].stats


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
    """Twice the vocabulary, the most probable token beyond the end of the real one."""
    tensor = response.dense_rows
    rows, width = tensor.shape
    wide = np.zeros((rows, 2 * width), dtype="<f4")
    wide[:, -1] = 100.0
    tensor.shape[1], tensor.data = 2 * width, wide.tobytes()


def set_logits(response: target_pb2.VerifyResponse) -> None:
    response.dense_rows.data = np.full(len(response.dense_rows.data) // 4, np.nan, dtype="<f4").tobytes()


def flatten(response: target_pb2.VerifyResponse) -> None:
    """One number, which is as many as no dimensions need."""
    response.dense_rows.ClearField("shape")
    response.dense_rows.data = bytes(4)


SUPPORT_ROWS = replace(REQUESTS["greedy"], row_kind=RowKind.SUPPORT)
TYPICAL = replace(REQUESTS["residual"], rejection_sampling_strategy="typical-acceptance")
DENSE_GREEDY, DENSE_SAMPLED = (replace(REQUESTS[name], logprobs=2) for name in ("greedy", "residual"))

NONSENSE: dict[str, tuple[GenerationRequest, Fault]] = {
    "an unknown token is the most probable": (SUPPORT_ROWS, set_argmax),
    "no statistics": (TYPICAL, drop_statistics),
    "probabilities are no numbers": (REQUESTS["residual"], set_probabilities),
    "a token is likelier than all tokens outside": (REQUESTS["residual"], set_outside_probability),
    "greedy rows of another vocabulary": (DENSE_GREEDY, widen),
    "sampled rows of another vocabulary": (DENSE_SAMPLED, widen),
    "greedy logits are no numbers": (DENSE_GREEDY, set_logits),
    "sampled logits are no numbers": (DENSE_SAMPLED, set_logits),
    "a number in place of rows": (DENSE_GREEDY, flatten),
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_rows_that_no_model_has_cost_the_replica_and_not_the_request(
    kind: str, model: LoadedModel, other_model: LoadedModel
) -> None:
    request, fault = NONSENSE[kind]
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, Faults(), Faults()) as two:
        undisturbed = await complete(two.client, request)
        for each in two.faults:
            each.steps, each.opened = 0, 0
        # The first answer in which each of them has more than the bonus row to tell.
        two.faults[0].garbled[2] = two.faults[1].garbled[2] = fault
        completed = await complete(two.client, request)
        assert two.opened == 3, "one stream to begin with, and one for each loss"
    assert completed.token_ids == undisturbed.token_ids
    assert completed.drafted == undisturbed.drafted


async def test_the_only_target_is_used_again_once_it_answers(
    model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    faults = Faults(before={3}, after={5})
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, faults) as one:
        completed = await complete(one.client, REQUESTS["greedy"])
    assert completed.text == undisturbed["greedy"].text
    assert faults.opened == 3


async def test_without_any_target_the_request_ends_and_says_how_far_it_came(
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


async def test_a_request_that_ends_targets_does_not_end_them_all(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    """Over the same tokens every target is lost; one after another, they would all go."""
    faults = tuple(Faults(after=set(range(1, 100))) for _ in range(MAX_LOSSES + 2))
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faults) as many:
        with pytest.raises(ProtocolError, match=f"{MAX_LOSSES} targets were lost"):
            await complete(many.client, REQUESTS["greedy"])
        assert many.opened == MAX_LOSSES


async def test_nonsense_from_the_only_target_is_an_error(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    faults = Faults(garbled=dict.fromkeys(range(1, 9), drop_rows))
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, faults) as one:
        with pytest.raises(ProtocolError):
            await complete(one.client, REQUESTS["greedy"])
        assert faults.opened == 1


async def test_what_is_the_requests_fault_is_not_tried_again(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    faults = (
        Faults(before={1}, code=grpc.StatusCode.INVALID_ARGUMENT),
        Faults(before={1}, code=grpc.StatusCode.INVALID_ARGUMENT),
    )
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, *faults) as two:
        with pytest.raises(InvalidRequestError):
            await complete(two.client, REQUESTS["greedy"])
        assert two.opened == 1


async def test_a_target_without_room_sends_a_request_to_another(
    model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    full, free = Faults(full=True), Faults()
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, full, free) as two:
        assert (await complete(two.client, REQUESTS["strict"])).text == undisturbed["strict"].text
        free.full = True
        with pytest.raises(CapacityError):
            await complete(two.client, REQUESTS["strict"])


async def test_a_request_that_has_begun_waits_for_room(
    model: LoadedModel, other_model: LoadedModel, undisturbed: dict[str, Completed]
) -> None:
    faults = Faults(after={3})
    faults.garbled[2] = lambda _: setattr(faults, "full", True)
    async with asyncio.timeout(BOUND_SECONDS), cluster(model, other_model, faults) as one:
        task = asyncio.create_task(complete(one.client, REQUESTS["greedy"]))
        await until(lambda: faults.steps == 3, BOUND_SECONDS)
        await asyncio.sleep(1.0)
        assert not task.done()
        faults.full = False
        assert (await task).text == undisturbed["greedy"].text


async def test_nothing_is_left_open_and_each_round_is_counted_once(
    model: LoadedModel, other_model: LoadedModel
) -> None:
    faults = (Faults(after={2}), Faults(before={2}))
    async with cluster(model, other_model, *faults) as two:
        completed = await complete(two.client, REQUESTS["residual"])
        await until(lambda: not any(each.running for each in faults), BOUND_SECONDS)
        shots = two.service.replicas.snapshots()
        await until(lambda: not any(each.open_sequences for each in two.service.replicas.snapshots()), 5.0)
        targets = [each.figures for each in shots if each.role is Role.TARGET]
        drafts = [each.figures for each in shots if each.role is Role.DRAFT]
    assert sum(each.rounds for each in targets) == completed.stats.rounds
    for figures in (targets, drafts):
        assert sum(each.drafted for each in figures) == completed.stats.drafted
        assert sum(each.accepted for each in figures) == completed.stats.accepted

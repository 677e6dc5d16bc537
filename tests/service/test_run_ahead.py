"""A target that begins rounds before it is asked changes the time of a completion, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.errors import TandemError
from tandem.types import GenerationRequest, TokenRow, Verification
from tests.service.clients import Completed, complete, until
from tests.service.engines import Fault, Faults, target
from tests.service.fakes import coordinator, refusal

BOUND_SECONDS = 60.0
LEADS = (0, 1, 2, 8)
GREEDY = GenerationRequest("def f(", max_tokens=24, temperature=0.0, ignore_eos=True)
REQUESTS = {
    "greedy": GREEDY,
    **{
        f"{rule}, temperature {temperature}": replace(
            GREEDY, temperature=temperature, seed=seed, rejection_sampling_strategy=rule
        )
        for seed, (rule, temperature) in enumerate(
            itertools.product(("strict", "residual", "block"), (0.7, 1.0))
        )
    },
    "penalties, biases and a minimum": replace(
        GREEDY,
        temperature=1.0,
        seed=9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={300: 5.0},
        min_tokens=6,
        ignore_eos=False,
    ),
}


@asynccontextmanager
async def alone(
    model: LoadedModel, lead: int, *faults: Faults, max_sequences: int = 8
) -> AsyncIterator[tuple[Client, CoordinatorService]]:
    """A client of a coordinator with this lead, over a target for each set of faults and no draft."""
    async with asyncio.timeout(BOUND_SECONDS), AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(target(model, each, max_sequences=max_sequences))
            for each in faults or (Faults(),)
        ]
        addresses = ",".join(address for address, _ in targets)
        settings = CoordinatorSettings(target_address=addresses, target_lead=lead)
        address, service = await stack.enter_async_context(coordinator(settings))
        yield await stack.enter_async_context(Client(address)), service


async def completions(
    model: LoadedModel, lead: int, requests: Iterable[GenerationRequest], *faults: Faults
) -> list[Completed]:
    """Complete the requests one after the other."""
    async with alone(model, lead, *faults) as (client, _):
        return [await complete(client, request) for request in requests]


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> dict[str, Completed]:
    """The completions without a lead."""
    found = asyncio.run(completions(model, 0, REQUESTS.values()))
    assert all(each.stats.lead.rounds == 0 for each in found)
    return dict(zip(REQUESTS, found, strict=True))


@pytest.mark.parametrize("lead", LEADS[1:])
async def test_the_text_does_not_depend_on_the_lead(
    model: LoadedModel, plain: dict[str, Completed], lead: int
) -> None:
    for name, found in zip(REQUESTS, await completions(model, lead, REQUESTS.values()), strict=True):
        assert (found.text, found.token_ids) == (plain[name].text, plain[name].token_ids), name
        # Every round but the first, which the request asks for.
        assert found.stats.lead.rounds == len(found.token_ids) - 1, name


@pytest.mark.parametrize("lead", LEADS)
async def test_sixteen_streams_have_the_text_of_each_alone(
    model: LoadedModel, plain: dict[str, Completed], lead: int
) -> None:
    names = [*REQUESTS] * 2
    async with alone(model, lead, max_sequences=16) as (client, _):
        found = await asyncio.gather(*(complete(client, REQUESTS[name]) for name in names))
    assert [each.token_ids for each in found] == [plain[name].token_ids for name in names]


@pytest.mark.parametrize("lead", LEADS[1:])
async def test_a_completion_ends_at_the_same_token_wherever_that_lies_in_a_lead(
    model: LoadedModel, plain: dict[str, Completed], lead: int
) -> None:
    request = REQUESTS["strict, temperature 1.0"]
    whole = plain["strict, temperature 1.0"]
    positions = [n for n in range(1, 12) if whole.token_ids[n] not in whole.token_ids[:n]]
    assert len(positions) > lead, "every position of a lead is an end"
    by_id = [replace(request, stop_token_ids=(whole.token_ids[n],)) for n in positions]
    by_length = [replace(request, max_tokens=n + 1) for n in positions]
    by_text = [replace(request, stop=(whole.text[:n],)) for n in range(1, 12)]
    without = await completions(model, 0, [*by_id, *by_length, *by_text])
    async with alone(model, lead) as (client, service):
        stats = service.completions.stats
        for index, expected in enumerate(without[: 2 * len(positions)]):
            found = await complete(client, [*by_id, *by_length][index])
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert len(found.token_ids) == positions[index % len(positions)] + 1
        # The target knows ends by an id and by the length itself.
        assert stats.snapshot()[0].lead.wasted == 0
        for request, expected in zip(by_text, without[2 * len(positions) :], strict=True):
            found = await complete(client, request)
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert 0 < stats.snapshot()[0].lead.wasted <= lead * len(by_text)


def lost_at(count: int, *, is_answered: bool) -> Faults:
    """A target that is lost once, with its step or its answer of this number, from 1 on."""
    answers = itertools.count(1)

    def broken(answer: Verification) -> Verification:
        if next(answers) == count:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "gone")
        return answer

    return Faults(garbled=dict.fromkeys(range(100), broken)) if is_answered else Faults(before={count})


@pytest.mark.parametrize("lead", LEADS[1:])
@pytest.mark.parametrize("is_answered", [False, True])
async def test_the_text_survives_a_loss_in_the_middle_of_a_lead(
    model: LoadedModel, plain: dict[str, Completed], is_answered: bool, lead: int
) -> None:
    for step in (1, 2, 7):
        for name in ("greedy", "strict, temperature 1.0", "residual, temperature 0.7"):
            faulty = [lost_at(number, is_answered=is_answered) for number in (step, 5)]
            (found,) = await completions(model, lead, [REQUESTS[name]], *faulty)
            assert found.token_ids == plain[name].token_ids
            assert sum(each.opened for each in faulty) == 3, "one to begin with, and one for each loss"


def other_led_token(answer: Verification) -> Verification:
    """Claim to have gone on with another token than the rows named."""
    return answer if answer.led_token_id < 0 else replace(answer, led_token_id=answer.led_token_id + 1)


def other_length(answer: Verification) -> Verification:
    """Claim to have skipped a token."""
    return answer if answer.led_token_id < 0 else replace(answer, base_length=answer.base_length + 1)


def unknown_token(answer: Verification) -> Verification:
    """Send a row that no model of this vocabulary has."""
    return answer if answer.led_token_id < 0 else replace(answer, rows=(TokenRow(1 << 20),))


def other_proposal(answer: Verification) -> Verification:
    """Claim to go on with a proposal, where nobody has made one."""
    return replace(answer, next_proposed=2)


@pytest.mark.parametrize("lie", [other_led_token, other_length, unknown_token, other_proposal])
async def test_a_target_whose_lead_contradicts_its_rows_is_left(
    model: LoadedModel, plain: dict[str, Completed], lie: Fault
) -> None:
    lying = Faults(garbled=dict.fromkeys(range(4, 100), lie))
    (found,) = await completions(model, 2, [GREEDY], lying, Faults())
    assert found.token_ids == plain["greedy"].token_ids
    lying.steps = 0
    with pytest.raises(TandemError, match="no target service could go on"):
        await completions(model, 2, [GREEDY], lying)


async def test_a_cancelled_request_wastes_no_more_than_its_lead(model: LoadedModel) -> None:
    async with alone(model, 2) as (client, service):
        async with aclosing(client.generate(replace(GREEDY, max_tokens=400))) as chunks:
            async for _ in chunks:
                break
        await until(lambda: not service.completions.requests.list(), BOUND_SECONDS)
        assert service.completions.stats.snapshot()[0].lead.wasted <= 2

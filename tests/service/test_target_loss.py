"""A lost, hanging or draining target, or one with invalid rows, costs a pause: the text is the same to the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from tandem.clients.client import Client, Completed
from tandem.engine.models.loading import LoadedModel
from tandem.errors import (
    CapacityError,
    InvalidRequestError,
    ServiceUnavailableError,
    TandemError,
    status_code,
)
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.types import GenerationRequest, Verification, VerifyStep
from tandem.serving.streams import SequenceStreams
from tandem_coordinator.rounds.target_side import MAX_LOSSES, SUSPICIOUS_DEATHS
from tests.service.clients import complete, until
from tests.service.engines import Faults, MakePair, target
from tests.service.fakes import NOT_SERVING, FakeTarget, Fleet, Served, coordinated, fleet, refusal, served
from tests.service.test_hops import fault_proxy

GREEDY = GenerationRequest(
    "def f(", max_tokens=24, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
REQUESTS = {
    "greedy": GREEDY,
    **{
        rule: replace(GREEDY, temperature=1.0, seed=seed, rejection_sampling_strategy=rule)
        for seed, rule in enumerate(("strict", "residual", "block"), 5)
    },
}


@pytest.fixture(scope="module")
def undisturbed(pair: MakePair) -> dict[str, Completed]:
    async def complete_all() -> dict[str, Completed]:
        async with pair() as (client, _):
            return {name: await complete(client, request) for name, request in REQUESTS.items()}

    return asyncio.run(complete_all())


def shift_base(verification: Verification) -> Verification:
    return replace(verification, base_length=verification.base_length + 1)


LOSSES: dict[str, Callable[[set[int]], Faults]] = {
    "before the step is computed": lambda steps: Faults(before=steps),
    "before its answer leaves": lambda steps: Faults(after=steps),
    "by a stream that ends without an error": lambda steps: Faults(leaving=steps),
    "with an answer for another length": lambda steps: Faults(garbled=dict.fromkeys(steps, shift_base)),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_the_text_survives_a_loss_at_any_point_of_a_round(
    loss: str, pair: MakePair, undisturbed: dict[str, Completed]
) -> None:
    """One of two targets fails at its first or third step, and the other one at its fourth."""
    for step, rules in ((1, ("greedy", "residual")), (3, ("strict", "block"))):
        faults = LOSSES[loss]({step, step + 4})
        async with pair(faults, faults) as (client, _):
            for rule in rules:
                faults.steps = faults.opened = 0
                completed = await complete(client, REQUESTS[rule])
                assert faults.opened == 3, "one sequence to begin with, and one for each loss"
                assert completed.token_ids == undisturbed[rule].token_ids
                assert completed.text == undisturbed[rule].text
                assert completed.drafted == undisturbed[rule].drafted
                assert completed.speculation == undisturbed[rule].speculation


async def test_without_any_target_the_error_says_how_many_tokens_were_delivered(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        target(model, Faults()) as (address, server),
        coordinated(address, target_wait_seconds=0.5) as (client, _),
    ):
        chunks = client.generate(REQUESTS["greedy"])
        delivered = list((await anext(chunks)).token_ids)
        await server.stop(None)
        with pytest.raises(ServiceUnavailableError, match="no target service was ready within") as raised:  # noqa: PT012 - until it raises
            async for chunk in chunks:
                delivered += chunk.token_ids
        assert f"{len(delivered)} token" in str(raised.value)
        assert address not in str(raised.value), "clients learn nothing about internals"
        assert f"{address} is down" in "".join(str(vars(record).get("replicas")) for record in caplog.records)
        with pytest.raises(ServiceUnavailableError, match="0 tokens had been delivered"):
            await complete(client, REQUESTS["greedy"])


async def test_a_request_that_a_target_refuses_is_tried_on_the_others(
    pair: MakePair, undisturbed: dict[str, Completed]
) -> None:
    """The coordinator has checked it, so it may be the target that errs."""
    refusing = Faults(before={1, 2}, code=grpc.StatusCode.INVALID_ARGUMENT)
    other = Faults()
    async with pair(refusing, other) as (client, _):
        assert (await complete(client, REQUESTS["greedy"])).text == undisturbed["greedy"].text
        other.before = {other.steps + 1}
        other.code = grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(InvalidRequestError, match="no target service takes the request") as raised:
            await complete(client, REQUESTS["greedy"])
        assert len(str(raised.value)) < 300


async def test_a_request_goes_to_another_target_when_one_is_full(
    pair: MakePair, undisturbed: dict[str, Completed]
) -> None:
    full = Faults(full=True)
    free = Faults()
    async with pair(full, free) as (client, _):
        assert (await complete(client, REQUESTS["strict"])).text == undisturbed["strict"].text
        free.full = True
        with pytest.raises(CapacityError):
            await complete(client, REQUESTS["strict"])


async def test_a_started_request_waits_for_room(pair: MakePair, undisturbed: dict[str, Completed]) -> None:
    faults = Faults(after={3})

    def fill(verification: Verification) -> Verification:
        faults.full = True
        return verification

    faults.garbled[2] = fill
    async with pair(faults) as (client, _):
        task = asyncio.create_task(complete(client, REQUESTS["greedy"]))
        await until(lambda: faults.refused > 1)
        assert not task.done()
        faults.full = False
        assert (await task).text == undisturbed["greedy"].text


async def test_after_losses_no_stream_stays_open_and_each_round_counts_once(pair: MakePair) -> None:
    faults = (Faults(after={2}), Faults(before={2}))
    async with pair(*faults) as (client, service):
        completed = await complete(client, REQUESTS["residual"])
        await until(lambda: not any(each.running for each in faults))
        snapshots = service.replicas.snapshots()
        await until(lambda: not any(each.open_sequences for each in service.replicas.snapshots()))
        targets = [each.figures for each in snapshots if each.role is Role.TARGET]
        drafts = [each.figures for each in snapshots if each.role is Role.DRAFT]
    assert sum(each.rounds for each in targets) == completed.speculation.rounds
    for stats in (targets, drafts):
        assert sum(each.drafted for each in stats) == completed.speculation.drafted
        assert sum(each.accepted for each in stats) == completed.speculation.accepted


TOKENS = 50
EXPECTED = tuple(range(11, 11 + TOKENS))
BREAKING = 5
STEP_SECONDS = 0.03


def request(first_token: int) -> GenerationRequest:
    return GenerationRequest((first_token,), max_tokens=TOKENS, temperature=0.0)


class Breaking(FakeTarget):
    """A target whose stream breaks at a certain prompt."""

    step_seconds = STEP_SECONDS

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        if step.delta.base_length == 0 and tokens[0] == BREAKING:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "gone")
        return await super().verified(tokens, step)


async def test_a_broken_stream_moves_no_other_sequence() -> None:
    """The targets live: the request is tried again, now and then, for as long as it may wait for one."""
    targets = (Breaking(), Breaking())
    async with fleet(*targets, target_wait_seconds=0.5) as (client, *_):
        task = asyncio.create_task(complete(client, request(10)))
        await until(lambda: any(each.running for each in targets))
        with pytest.raises(ServiceUnavailableError, match=r"none went on within 0\.5 s"):
            await complete(client, request(BREAKING))
        assert (await task).token_ids == EXPECTED
    assert MAX_LOSSES < sum(each.opened for each in targets) - 1 < 60, "the client tries again too"


class Dying(FakeTarget):
    """A target whose process dies of a certain prompt, and may be started again."""

    step_seconds = STEP_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self.service: Served | None = None
        self.deaths = 0
        self.is_restarted = False

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        if step.delta.base_length == 0 and tokens[0] == BREAKING:
            self.deaths += 1
            dying = asyncio.create_task(self.die())
            await asyncio.shield(dying)
        return await super().verified(tokens, step)

    async def die(self) -> None:
        assert self.service is not None
        await self.service.stop()
        if self.is_restarted:
            self.streams = SequenceStreams()
            await self.service.start()


@asynccontextmanager
async def mortal(
    count: int, *, is_restarted: bool, **options: float
) -> AsyncIterator[tuple[Client, list[Dying]]]:
    targets = [Dying() for _ in range(count)]
    async with fleet(*targets, **options) as (client, services, _):
        for each, service in zip(targets, services, strict=True):
            each.service = service
            each.is_restarted = is_restarted
        yield client, targets


async def assert_ends(client: Client, deaths: int) -> None:
    with pytest.raises(TandemError, match=f"{deaths} targets were lost over the same tokens") as raised:
        await complete(client, request(BREAKING))
    assert status_code(raised.value) is grpc.StatusCode.INTERNAL, "clients do not try it again"


@pytest.mark.parametrize("count", [3, 4])
async def test_a_request_that_kills_targets_leaves_the_third_alive(count: int) -> None:
    async with mortal(count, is_restarted=False, target_wait_seconds=1.0) as (client, targets):
        await assert_ends(client, SUSPICIOUS_DEATHS)
        assert sum(each.deaths for each in targets) == SUSPICIOUS_DEATHS
        assert (await complete(client, request(10))).token_ids == EXPECTED


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_a_request_that_kills_targets_is_tried_once_more_where_one_was_started_again(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However quickly they are there again: as other processes. The others live."""
    monkeypatch.setattr("tandem_coordinator.rounds.target_side.UNANSWERED_SECONDS", 1.0)
    async with mortal(count, is_restarted=True) as (client, targets):
        await assert_ends(client, MAX_LOSSES)
        assert sum(each.deaths for each in targets) == MAX_LOSSES
        assert sum(each.deaths > 0 for each in targets) <= SUSPICIOUS_DEATHS
        assert (await complete(client, request(10))).token_ids == EXPECTED


async def test_requests_beside_one_that_kills_targets_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They die with it twice over the same tokens, and are suspects too: the cause is lost alone."""
    monkeypatch.setattr("tandem_coordinator.rounds.target_side.UNANSWERED_SECONDS", 1.0)
    async with mortal(2, is_restarted=True) as (client, targets):
        tasks = [asyncio.create_task(complete(client, request(10))) for _ in range(16)]
        await until(lambda: all(each.running for each in targets))
        await assert_ends(client, MAX_LOSSES)
        assert {each.token_ids for each in await asyncio.gather(*tasks)} == {EXPECTED}


async def test_streams_whose_two_targets_die_together_go_on_with_the_third() -> None:
    """Nobody starts the two again, and nobody takes the streams for the cause."""
    async with mortal(3, is_restarted=False, target_wait_seconds=1.0) as (client, targets):
        for each in targets:
            each.step_seconds = STEP_SECONDS
        tasks = [asyncio.create_task(complete(client, request(10))) for _ in range(24)]
        await until(lambda: all(each.running for each in targets))
        await asyncio.gather(*(each.die() for each in targets[:2]))
        assert {each.token_ids for each in await asyncio.gather(*tasks)} == {EXPECTED}


async def test_a_link_that_breaks_again_and_again_ends_no_stream() -> None:
    """The processes live, so the request is not what breaks it."""
    targets = [FakeTarget(), FakeTarget()]
    for each in targets:
        each.step_seconds = STEP_SECONDS
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        services = await enter(served(*targets))
        links = [await enter(fault_proxy(each.address)) for each in services]
        client, service = await enter(coordinated(",".join(each.address for each in links)))
        shots = service.replicas.snapshots
        await until(lambda: all(each.state is ReplicaState.READY for each in shots()))
        tasks = [asyncio.create_task(complete(client, request(10))) for _ in range(16)]
        await until(lambda: all(each.running for each in targets))
        for _ in range(12):
            for link in links:
                link.reset()
            await asyncio.sleep(0.25)
        assert {each.token_ids for each in await asyncio.gather(*tasks)} == {EXPECTED}


async def test_a_full_target_takes_over_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence may stay on its draining target."""
    monkeypatch.setattr("tandem_coordinator.rounds.target_side.MOVE_SECONDS", 0.2)
    targets = (Breaking(), Breaking())
    async with fleet(*targets) as (client, services, _):
        task = asyncio.create_task(complete(client, request(10)))
        await until(lambda: any(each.running for each in targets))
        draining, full = sorted(services, key=lambda each: -each.fake.running)
        assert isinstance(full.fake, FakeTarget)
        full.fake.step_seconds = 60.0
        await draining.say(NOT_SERVING)
        await until(lambda: full.fake.running == 1)
        assert (await task).token_ids == EXPECTED
        await until(lambda: not full.fake.running and not draining.fake.running)
    assert (draining.fake.opened, full.fake.opened) == (1, 1)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_that_broke_at_the_client_goes_on_with_the_same_tokens(
    pair: MakePair, name: str
) -> None:
    """Noise is keyed by position, so a completion does not depend on where the client took it up again."""
    request = replace(REQUESTS[name], presence_penalty=0.5, speculation=False)
    async with pair() as (client, _):
        whole = await complete(client, request)
        for cut in (1, 7):
            rest = await client.complete(request, delivered_token_ids=whole.token_ids[:cut])
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
            assert rest.summary.completion_tokens == len(whole.token_ids)
            assert whole.text.endswith(rest.text)
        with pytest.raises(InvalidRequestError, match="delivered_token_ids holds token id -1"):
            await complete(client, replace(request, delivered_token_ids=(-1,)))


VERIFICATION_SECONDS = 0.5
PROBE_LENGTH = 2
"""Tokens of a probe, as `TargetClient.probe` asks."""
REQUEST = GenerationRequest((1, 2, 3), max_tokens=20, temperature=0.0, ignore_eos=True)
COUNTED = list(range(4, 24))


class HangingTarget(FakeTarget):
    """Answers this many steps, and hangs on the others."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers = answers
        self.works = asyncio.Event()
        self.steps = 0
        self.requests = 0

    def begin(self, max_length: int) -> list[int]:
        self.requests += max_length > PROBE_LENGTH
        return super().begin(max_length)

    async def verified(self, tokens: Sequence[int], step: VerifyStep) -> Verification:
        self.steps += 1
        if self.steps > self.answers:
            await self.works.wait()
        return self.verification(tokens, step)


def shot(tried: Fleet, fake: FakeTarget) -> ReplicaSnapshot:
    address = next(each.address for each in tried.services if each.fake is fake)
    return next(each for each in tried.coordinator.replicas.snapshots() if each.address == address)


@asynccontextmanager
async def over(*fakes: FakeTarget, wait_seconds: float = 30.0) -> AsyncIterator[Fleet]:
    bounds = {"verification_timeout_seconds": VERIFICATION_SECONDS, "target_wait_seconds": wait_seconds}
    async with fleet(*fakes, **bounds) as tried:
        yield tried


async def four(client: Client) -> None:
    found = await asyncio.gather(*(complete(client, REQUEST) for _ in range(4)))
    assert [list(each.token_ids) for each in found] == [COUNTED] * 4


@pytest.mark.parametrize("answers", [0, 3])
async def test_requests_continue_beside_a_hanging_target_which_gets_none_until_it_answers_a_probe(
    answers: int,
) -> None:
    """It hangs from its first step on, or in the middle of streams: no token is lost or repeated."""
    hanging = HangingTarget(answers)
    healthy = FakeTarget()
    async with over(hanging, healthy) as tried:
        await four(tried.client)
        assert hanging.steps > answers, "the target hung too early"
        await until(lambda: shot(tried, hanging).state is ReplicaState.DOWN)
        assert "probe" in shot(tried, hanging).reason
        requests = hanging.requests
        await four(tried.client)
        assert hanging.requests == requests
        hanging.works.set()
        await until(lambda: shot(tried, hanging).state is ReplicaState.READY)
        await four(tried.client)
        assert hanging.requests > requests


async def test_the_only_target_may_be_slow() -> None:
    """Without another target a sequence stays, and nothing is computed again."""
    slow = HangingTarget(2)
    async with over(slow) as tried:
        task = asyncio.create_task(complete(tried.client, REQUEST))
        await asyncio.sleep(4 * VERIFICATION_SECONDS)
        assert not task.done()
        slow.works.set()
        assert list((await task).token_ids) == COUNTED
    assert slow.opened == 1


async def test_the_only_target_must_not_hang_forever() -> None:
    hanging = HangingTarget(2)
    async with over(hanging, wait_seconds=0.2) as tried:
        with pytest.raises(ServiceUnavailableError, match="tokens had been delivered"):
            await complete(tried.client, REQUEST)


async def test_a_loss_after_a_long_wait_is_recovered() -> None:
    """A prompt may take longer to read than a request waits for a target."""
    slow = HangingTarget(0)
    other = FakeTarget()
    async with over(slow, other, wait_seconds=0.3) as tried:
        assert list((await complete(tried.client, REQUEST)).token_ids) == COUNTED

"""Targets with heads of their own that lie, fail, die, or run out of memory: no text changes by it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.drafting.repeats import Repeats
from tandem.engine.core.jobs import Leads
from tandem.errors import InvalidRequestError, TandemError
from tandem.model.types import (
    AcceptanceTerms,
    Delta,
    GenerationRequest,
    GoesOn,
    Grammar,
    GrammarKind,
    Proposal,
    RowKind,
    SamplingParams,
    SparseDistribution,
    SupportRow,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem_coordinator.transport.target_client import TargetSequence
from tandem_target import loading
from tandem_target.head_drafter import HeadDrafter
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import exact
from tests.heads import save_eagle3
from tests.service.clients import complete, complete_all, until
from tests.service.engines import Fault, Faults, FaultyTarget
from tests.service.fakes import HANG_SECONDS, serving
from tests.service.test_drafting_ahead import PLACES
from tests.service.test_own_heads import (
    BYTES_OF_A_TOKEN,
    GREEDY,
    MANY,
    PROMPTS,
    SEEDED,
    STRICT,
    Host,
    Pair,
    accepted,
    assert_greedy,
    over,
    saved,
    texts,
)
from tests.unit.target_service.test_head_drafter import running, saved_target, small_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved(tmp_path_factory.mktemp("pair"), "eagle3")


# ---- exactness


@pytest.mark.soak
@pytest.mark.parametrize("rule", ["strict", "residual", "block"])
async def test_led_rounds_of_many_seeds_are_those_that_were_asked_for(pair: Pair, rule: str) -> None:
    requests = [
        replace(STRICT, rejection_sampling_strategy=rule, seed=seed, prompt=PROMPTS[seed % 6], max_tokens=10)
        for seed in range(200)
    ]
    async with asyncio.timeout(10 * HANG_SECONDS), pair.host(max_sequences=8) as hosted:
        async with over(hosted, target_lead=0, speculation_policy="fixed") as (address, _):
            asked = await complete_all(address, requests, 8)
        async with over(hosted, target_lead=4, speculation_policy="fixed") as (address, _):
            led = await complete_all(address, requests, 8)
    assert texts(led) == texts(asked)
    for before, after in zip(asked, led, strict=True):
        one = before.speculation
        other = after.speculation
        assert (one.rounds, one.drafted, one.accepted) == (other.rounds, other.drafted, other.accepted)
        assert other.lead.wasted == 0
    assert sum(each.speculation.lead.rounds for each in led) > 400


@pytest.mark.soak
@pytest.mark.parametrize("rule", ["residual", "block"])
async def test_led_rounds_keep_the_targets_distribution(pair: Pair, rule: str) -> None:
    request = replace(
        STRICT, rejection_sampling_strategy=rule, top_k=3, max_tokens=5, num_speculative_tokens=2
    )
    many = [replace(request, seed=seed) for seed in range(400)]
    async with (
        asyncio.timeout(10 * HANG_SECONDS),
        pair.host(max_sequences=8) as hosted,
        over(hosted, target_lead=4) as (address, _),
    ):
        found = await complete_all(address, many, 8)
    assert sum(each.speculation.lead.rounds for each in found) > 400
    assert_drawn_from(exact(pair.model, request, PLACES.stop), found, PLACES, 0.45)


# ---- rounds that are taken back


class Led:
    """A sequence of a target that goes on by itself, with the answers that nobody has asked for yet."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Verification] = asyncio.Queue()

    def take(self, answer: Verification | TandemError) -> None:
        assert isinstance(answer, Verification)
        self.answers.put_nowait(answer)


def assert_same(one: Verification, other: Verification) -> None:
    assert one.base_length == other.base_length
    first = one.proposal or Proposal(one.base_length)
    second = other.proposal or Proposal(other.base_length)
    assert first.token_ids == second.token_ids
    for own, same in zip(first.distributions, second.distributions, strict=True):
        assert own.token_ids.tolist() == same.token_ids.tolist()
        np.testing.assert_allclose(own.probs, same.probs, atol=1e-4)
    for row, same_row in zip(one.rows, other.rows, strict=True):
        if isinstance(row, TokenRow):
            assert row == same_row
        else:
            assert isinstance(row, SupportRow)
            assert isinstance(same_row, SupportRow)
            np.testing.assert_allclose(row.probs, same_row.probs, atol=1e-4)
            assert row.outside_token_id == same_row.outside_token_id


async def take_back(verifier: Any, terms: AcceptanceTerms, rng: random.Random, steps: int) -> tuple[int, int]:
    """Steps at random on one sequence: those that it has begun by itself, or any others. Returns how many of each."""
    sampling = SamplingParams(temperature=0.0 if terms.name == "greedy" else 1.0, seed=rng.randrange(1 << 30))
    options = TargetOptions("r", sampling, prompt_length=2, max_length=96, acceptance=terms)
    followed = 0
    led = Led()
    tokens = [rng.randrange(6) for _ in range(4)]
    async with verifier.sequence(options, led.take) as verified:
        rule = verified.rule
        kind = rule.row_kind()
        sent = 0
        expected: Verification | None = None
        given = Proposal(0)
        for _ in range(steps):
            own_tokens: int | None = rng.choice([None, 0, 1, 2, 4, 4])
            following = None if expected is None else expected.goes_on
            if (
                expected is not None
                and following is not None
                and following.own_tokens is not None
                and rng.random() < 0.6
            ):
                base = following.delta.base_length
                (last,) = following.delta.token_ids
                assert expected.proposal is not None
                accepted_tokens = expected.proposal.token_ids[: base - expected.base_length]
                tokens = [*tokens, *accepted_tokens, last]
                step = rule.own_step(following.delta, kind, 0, rng.choice([1, 2, 4]), own_tokens or 1)
                assert verified.confirms(step)
                answer = await led.answers.get()
                own_tokens = following.own_tokens
                followed += 1
            else:
                keep = rng.randrange(1, len(tokens) + 1) if rng.random() < 0.5 else len(tokens)
                tokens = [*tokens[:keep], *(rng.randrange(6) for _ in range(rng.randrange(1, 4)))]
                if len(tokens) > 60:
                    tokens = tokens[:3]
                start = rng.randrange(min(keep, sent, len(tokens) - 1) + 1)
                delta = Delta(start, tuple(tokens[start:]))
                if own_tokens is None:
                    given = Proposal(len(tokens), tuple(rng.randrange(6) for _ in range(rng.randrange(3))))
                    whole = Delta(start, (*delta.token_ids, *given.token_ids))
                    step = rule.step(whole, given, kind)
                else:
                    step = rule.own_step(delta, kind, 0, rng.choice([0, 1, 4]), own_tokens)
                answer = await verified.verify(step)
                led.answers = asyncio.Queue()
            sent = min(len(tokens), answer.base_length)
            await asyncio.sleep(0.003 if rng.random() < 0.3 else 0.0)  # it may go further
            expected = answer
            if own_tokens is None:
                again = rule.step(Delta(0, (*tokens, *given.token_ids)), given, kind)
            else:
                again = rule.own_step(Delta(0, tuple(tokens)), kind, 0, 0, own_tokens)
            async with verifier.sequence(options) as fresh:
                same = await fresh.verify(again)
            assert_same(answer, same)
    return followed, steps - followed


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash", "mtp", "eagle"])
async def test_rounds_are_taken_back_at_every_point(method: str, tmp_path: Any) -> None:
    own = saved(tmp_path, method)
    followed = taken_back = 0
    async with asyncio.timeout(10 * HANG_SECONDS), running(own.target, own.draft, max_length=128) as verifier:
        for seed in range(4):
            rng = random.Random(seed)
            rules = ("greedy", "strict", "residual", "block", "typical-acceptance")
            counts = await asyncio.gather(
                *(take_back(verifier, AcceptanceTerms(name), rng, 25) for name in rules)
            )
            followed += sum(one for one, _ in counts)
            taken_back += sum(other for _, other in counts)
    assert followed > 100
    assert taken_back > 100


# ---- lies


@asynccontextmanager
async def faulty_host(pair: Pair, faults: Faults, **settings: object) -> AsyncIterator[Host]:
    targets = FaultyTarget(faults)
    async with running(pair.target, pair.draft, **({"max_length": 128} | settings)) as verifier:
        targets.verifier = verifier
        async with serving(targets) as (address, server):
            yield Host(address, server, verifier)


def proposing(answer: Verification, **changes: Any) -> Verification:
    assert answer.proposal is not None
    return replace(answer, proposal=replace(answer.proposal, **changes))


def longer(answer: Verification) -> Verification:
    assert answer.proposal is not None
    count = 9
    rows = (*answer.rows, *answer.rows[-1:] * count)
    ids = (*answer.proposal.token_ids, *(1,) * count)
    given = answer.proposal.distributions
    return replace(
        proposing(answer, token_ids=ids, distributions=(*given, *given[-1:] * count)), rows=rows, goes_on=None
    )


def going_on(
    answer: Verification, accepted: int = 0, token_id: int | None = None, own: int | None = 4
) -> Verification:
    delta = Delta(answer.base_length + accepted, (1 if token_id is None else token_id,))
    return replace(answer, goes_on=GoesOn(delta, own))


def distributed(answer: Verification, ids: Sequence[int], probs: Sequence[float]) -> Verification:
    assert answer.proposal is not None
    wrong = SparseDistribution(np.array(ids), np.array(probs))
    return proposing(answer, distributions=(wrong,) * len(answer.proposal))


RESIDUAL = replace(STRICT, rejection_sampling_strategy="residual")
LOGITS = replace(STRICT, rejection_sampling_strategy="logit-comparison")
LIES: dict[str, tuple[Fault, GenerationRequest]] = {
    "another base length": (lambda each: replace(each, base_length=each.base_length + 1), GREEDY),
    "a proposal behind other tokens": (
        lambda each: proposing(each, base_length=each.proposal.base_length + 1),  # type: ignore[union-attr]
        STRICT,
    ),
    "more tokens than asked for": (longer, GREEDY),
    "an unknown id": (lambda each: proposing(each, token_ids=(1 << 20,) * len(each.rows[1:])), STRICT),
    "a negative id": (lambda each: proposing(each, token_ids=(-1,) * len(each.rows[1:])), STRICT),
    "fewer tokens than rows": (lambda each: proposing(each, token_ids=()), GREEDY),
    "no proposal": (lambda each: replace(each, proposal=None), GREEDY),
    "no rows": (lambda each: replace(each, rows=()), GREEDY),
    "a sum that is not 1": (lambda each: distributed(each, range(6), [0.5] * 6), RESIDUAL),
    "not the token": (
        lambda each: distributed(each, [(each.proposal.token_ids[0] + 1) % 6], [1.0]),  # type: ignore[union-attr]
        RESIDUAL,
    ),
    "NaN": (lambda each: distributed(each, range(6), [float("nan")] * 6), RESIDUAL),
    "an empty distribution": (lambda each: distributed(each, [], []), RESIDUAL),
    "no distributions": (lambda each: proposing(each, distributions=()), RESIDUAL),
    "no logits": (lambda each: proposing(each, token_logits=None), LOGITS),
    "further than its proposal": (lambda each: going_on(each, 9), GREEDY),
    "before its proposal": (lambda each: going_on(each, -1), GREEDY),
    "with more tokens than asked for": (lambda each: going_on(each, own=60), STRICT),
    "behind an unknown id": (lambda each: going_on(each, token_id=1 << 20), STRICT),
    "alone": (lambda each: going_on(each, own=None), GREEDY),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_target_that_lies_of_its_head_is_left(pair: Pair, lie: str) -> None:
    fault, request = LIES[lie]

    def lied(answer: Verification) -> Verification:
        return fault(answer) if answer.proposal else answer

    options = {
        "speculation_policy": "fixed",
        "rejection_sampling_strategy": "logit-comparison",
        "target_lead": 2,
    }
    lying = Faults(garbled=dict.fromkeys(range(1000), lied))
    async with (
        asyncio.timeout(HANG_SECONDS),
        faulty_host(pair, lying) as liar,
        pair.host() as honest,
    ):
        async with over(honest, **options) as (address, _):
            (wanted,) = await complete_all(address, [request])
        async with over(liar, honest, **options) as (address, service):
            await until(lambda: all(each.model is not None for each in service.replicas.snapshots()))
            found = await complete_all(address, [request] * 4)
        assert lying.steps > 0
        assert texts(found) == texts([wanted] * 4)
        async with over(liar, **options) as (address, _):
            with pytest.raises(TandemError, match="no target service could go on"):
                await complete_all(address, [request])


HARMLESS: dict[str, Fault] = {
    "another token": lambda each: going_on(each),
    "another length": lambda each: going_on(each, len(each.rows) - 1, 2),
    "no announcement": lambda each: replace(each, goes_on=None),
    "a head of no use": lambda each: each,
}


@pytest.mark.parametrize("lead", [0, 4])
@pytest.mark.parametrize("lie", HARMLESS)
async def test_an_announcement_that_does_not_come_true_costs_only_itself(
    pair: Pair, lie: str, lead: int
) -> None:
    """The target answers what it was asked for all the same, or the sequence goes elsewhere."""

    def lied(answer: Verification) -> Verification:
        return HARMLESS[lie](answer) if answer.proposal else answer

    lying = Faults(garbled=dict.fromkeys(range(1000), lied))
    async with (
        asyncio.timeout(HANG_SECONDS),
        faulty_host(pair, lying) as liar,
        pair.host() as honest,
        over(liar, honest, target_lead=lead) as (address, _),
    ):
        found = await complete_all(address, [*MANY, *SEEDED])
        alone = await complete_all(address, [replace(each, speculation=False) for each in SEEDED])
    assert_greedy(pair, found[: len(MANY)])
    assert texts(found[len(MANY) :]) == texts(alone)


async def test_a_target_that_goes_further_than_it_may_is_left(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator asks so late that the target has time to go too far."""
    verify = TargetSequence.verify

    async def verify_late(sequence: TargetSequence, *asked: Any) -> Verification:
        await asyncio.sleep(0.05)
        return await verify(sequence, *asked)

    monkeypatch.setattr(TargetSequence, "verify", verify_late)
    async with asyncio.timeout(HANG_SECONDS), pair.host() as liar, pair.host() as honest:
        leads: Leads = liar.verifier._engine._leads
        follow = leads.follow

        def follow_at_once(job: Any, following: Any) -> Any:
            job.lead = 1000
            if (lead := leads._leads.get(job.sequence)) is not None:
                lead.allowed = 1000
            return follow(job, following)

        leads.follow = follow_at_once  # type: ignore[method-assign]
        async with over(liar, honest, target_lead=1) as (address, service):
            await until(lambda: all(each.model is not None for each in service.replicas.snapshots()))
            requests = [replace(each, max_tokens=30) for each in MANY]
            found = await complete_all(address, requests * 2)
            alone = await complete_all(address, [replace(each, speculation=False) for each in requests])
    assert texts(found) == texts(alone) * 2
    reasons = {getattr(record, "reason", "") for record in caplog.records}
    assert "target service: it went further by itself than it was allowed" in reasons


# ---- losses


@pytest.mark.parametrize("strikes", [2, pytest.param(7, marks=pytest.mark.soak)])
@pytest.mark.parametrize("strike", ["kill", "stop", "drain"])
async def test_targets_are_lost_in_led_rounds(pair: Pair, strike: str, strikes: int) -> None:
    requests = [*MANY[:3], *SEEDED[:3]]
    requests = [replace(each, max_tokens=40) for each in requests]
    async with asyncio.timeout(10 * HANG_SECONDS), pair.host() as hosted, over(hosted) as (address, _):
        wanted = texts(await complete_all(address, requests))
    for seed in range(strikes):
        async with (
            asyncio.timeout(HANG_SECONDS),
            pair.host() as first,
            pair.host() as second,
            over(first, second, target_lead=4) as (address, _),
            Client(address) as client,
            AdminClient(address) as admin,
        ):
            begun = asyncio.Event()
            running = [asyncio.create_task(complete(client, request, begun)) for request in requests]
            await begun.wait()
            await asyncio.sleep(random.Random(seed).random() * 0.03)
            if strike == "drain":
                await admin.drain(first.address)
            else:
                await first.server.stop(None if strike == "kill" else 0.02)
            assert texts(await asyncio.gather(*running)) == wanted


async def test_clients_that_leave_in_led_rounds_leave_nothing_behind(pair: Pair) -> None:
    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host() as hosted,
        over(hosted, target_lead=4) as (address, _),
        Client(address) as client,
    ):
        for seed in range(20):
            running = [asyncio.create_task(complete(client, replace(each, max_tokens=60))) for each in MANY]
            await asyncio.sleep(random.Random(seed).random() * 0.1)
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        found = await complete_all(address, MANY)
        await assert_nothing_left(hosted.verifier)
    assert_greedy(pair, found)


async def assert_nothing_left(verifier: Any) -> None:
    head = verifier.own_head
    engine = verifier._engine
    for _ in range(500):
        if not (head.drafted or engine.usage.sequence_count):
            break
        await asyncio.sleep(0.01)
    assert not head.drafted
    assert not head.pairings
    assert not engine._leads._leads
    assert head.usage.reserved_tokens == 0
    assert engine.usage.reserved_tokens == 0


# ---- memory


@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash"])
async def test_preempted_sequences_that_lead_keep_their_text(method: str, tmp_path: Any) -> None:
    own = saved(tmp_path, method)
    prompts = [(*prompt * 8,)[:56] for prompt in PROMPTS]
    requests = [replace(GREEDY, prompt=prompt) for prompt in prompts] * 2
    for room, places in ((8, 8), (4, 8), (6, 3)):
        async with (
            asyncio.timeout(HANG_SECONDS),
            own.host(
                kv_cache_memory_bytes=room * 64 * BYTES_OF_A_TOKEN[method],
                max_sequences=places,
                max_num_batched_tokens=16,
            ) as hosted,
            over(hosted, target_lead=4) as (address, _),
        ):
            found = await complete_all(address, requests, 8)
            await assert_nothing_left(hosted.verifier)
        assert_greedy(own, found, prompts * 2)


async def test_a_head_without_pages_costs_no_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    divide = loading.divide_memory

    def starved(*arguments: Any) -> Any:
        head, target = divide(*arguments)
        return replace(head, kv_cache_bytes=16384), target

    monkeypatch.setattr(loading, "divide_memory", starved)
    prompts = [(*prompt * 20,)[:80] for prompt in PROMPTS]
    requests = [replace(GREEDY, prompt=prompt) for prompt in prompts]
    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host() as hosted,
        over(hosted, target_lead=4) as (address, _),
    ):
        found = await complete_all(address, requests, 8)
        await assert_nothing_left(hosted.verifier)
    assert_greedy(pair, found, prompts)


@pytest.mark.soak
async def test_sequences_leave_nothing_of_the_head_behind(pair: Pair) -> None:
    terms = AcceptanceTerms("strict")
    async with (
        asyncio.timeout(10 * HANG_SECONDS),
        running(pair.target, pair.draft, max_length=64) as verifier,
    ):
        for seed in range(2000):
            options = TargetOptions(
                "r", SamplingParams(seed=seed), prompt_length=1, max_length=64, acceptance=terms
            )
            async with verifier.sequence(options, lambda answer: None) as verified:
                assert verified.rule is not None
                step = verified.rule.own_step(Delta(0, (1, 2, seed % 6)), RowKind.TOKEN, 0, seed % 3, 3)
                answer = await verified.verify(step)
                assert len(answer.rows) == 4
        await assert_nothing_left(verifier)


# ---- heads that fail


@pytest.mark.parametrize("place", ["a pass", "the preparation", "what is repeated"])
async def test_a_head_that_fails_costs_no_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no such luck")

    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host(draft_repeats=True) as hosted,
        over(hosted, target_lead=4) as (address, _),
    ):
        before = await complete_all(address, MANY)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            if place == "a pass":
                patched.setattr(hosted.verifier.own_head._engine, "_head", fail)
            elif place == "the preparation":
                patched.setattr(HeadDrafter, "_draft", fail)
            else:
                patched.setattr(Repeats, "propose", fail)
            found = [await complete_all(address, [*MANY, *SEEDED]) for _ in range(3)]
        messages = [record.getMessage() for record in caplog.records]
        found.append(await complete_all(address, MANY))
        await assert_nothing_left(hosted.verifier)
        assert hosted.verifier._engine.usage.sequence_count == 0
    assert_greedy(pair, before)
    assert accepted(before) > 0
    for each in found:
        assert_greedy(pair, each[: len(MANY)])
    assert "engine thread died" not in messages
    assert messages.count("head failed") <= 8, "it is given up"
    assert len(messages) < 120, messages


# ---- steps of others


async def test_a_step_for_a_head_that_is_not_there_is_refused(pair: Pair) -> None:
    step = VerifyStep(Delta(0, (1, 2, 3)), RowKind.TOKEN, 1, own_tokens=2)
    terms = AcceptanceTerms("strict")
    plain = TargetOptions("r", SamplingParams(seed=1), prompt_length=1, max_length=64)
    async with running(pair.target, pair.draft, max_length=64) as verifier:
        async with verifier.sequence(plain) as verified:
            with pytest.raises(
                InvalidRequestError, match="no drafting head of its own, or open has no acceptance_rule"
            ):
                await verified.verify(step)
        with pytest.raises(
            InvalidRequestError, match="rejection_sampling_strategy is 'guess'; it must be one of"
        ):
            async with verifier.sequence(replace(plain, acceptance=AcceptanceTerms("guess"))):
                pass
        for token_id in (-1, 6, 2**31 - 1):
            async with verifier.sequence(replace(plain, acceptance=terms)) as verified:
                with pytest.raises(
                    InvalidRequestError, match=f"Token id {token_id} is not in the vocabulary"
                ):
                    await verified.verify(replace(step, delta=Delta(0, (1, 2, token_id))))
                assert (await verified.verify(step)).proposal
        async with verifier.sequence(replace(plain, acceptance=terms)) as verified:
            with pytest.raises(InvalidRequestError, match="limit"):
                await verified.verify(replace(step, delta=Delta(0, (1,) * 65)))
            assert (await verified.verify(step)).proposal
        verifier.own_head = None
        async with verifier.sequence(replace(plain, acceptance=terms)) as verified:
            with pytest.raises(InvalidRequestError, match="no drafting head of its own"):
                await verified.verify(step)


async def test_more_tokens_than_a_table_of_outcomes_holds(pair: Pair) -> None:
    request = replace(GREEDY, num_speculative_tokens=100, max_tokens=110)
    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host() as hosted,
        over(hosted, num_speculative_tokens=100, target_lead=4) as (address, _),
    ):
        (found,) = await complete_all(address, [request])
        (alone,) = await complete_all(address, [replace(request, speculation=False)])
    assert found.token_ids == alone.token_ids
    assert found.speculation.drafted > 0


# ---- grammars


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "number": {"enum": [1, 22, 333]}},
        "required": ["name", "number"],
        "additionalProperties": False,
    }
)


async def test_grammars_have_the_text_that_they_have_alone(tmp_path: Any) -> None:
    model = small_target()
    folder = saved_target(model, tmp_path / "target")
    own = Pair("eagle3", model, folder, save_eagle3(tmp_path / "eagle3-head", model, draft_vocabulary=2048))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    plain = GenerationRequest(
        (5, 9, 2), max_tokens=48, temperature=0.0, num_speculative_tokens=3, grammar=grammar
    )
    requests = [
        plain,
        *(
            replace(plain, temperature=1.0, seed=seed, rejection_sampling_strategy="strict")
            for seed in range(7)
        ),
    ]
    async with asyncio.timeout(5 * HANG_SECONDS), own.host() as hosted:
        async with over(hosted) as (address, _):
            without = [replace(each, speculation=False) for each in requests]
            alone = await complete_all(address, without, 8)
        found = {}
        for lead in (0, 4):
            async with over(hosted, target_lead=lead, speculation_policy="fixed") as (address, _):
                found[lead] = await complete_all(address, requests, 8)
        await assert_nothing_left(hosted.verifier)
    assert texts(found[0]) == texts(found[4]) == texts(alone)
    assert sum(each.speculation.forced for each in found[4]) > 0
    for asked, led in zip(found[0], found[4], strict=True):
        one = asked.speculation
        other = led.speculation
        assert (one.rounds, one.drafted, one.accepted, one.forced) == (
            other.rounds, other.drafted, other.accepted, other.forced
        )  # fmt: skip
        assert sum(led.drafted) == other.accepted
        assert len(led.token_ids) <= other.rounds + other.accepted + other.forced

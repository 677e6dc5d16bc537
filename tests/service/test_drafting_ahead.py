"""Drafting ahead changes the speed of a completion, never its text or its distribution."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import grpc
import pytest

from tandem.clients.client import Completed
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.model.types import Finish, GenerationRequest, Proposal, ProposeStep
from tandem.wire.draft import Answer
from tandem_coordinator.controller import DraftAhead
from tandem_draft.servicer import DraftedFor, DraftServicer
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import blurred, exact, save_model, six_tokens
from tests.paths import DEVICE
from tests.service.clients import complete_all, until
from tests.service.engines import Faults, services
from tests.service.fakes import HANG_SECONDS, coordinated, hooked, refusal

STEP_SECONDS = 0.008
"""Minimum duration of a step of the target, in which the draft can draft ahead."""
TOKENS = 16
PROMPT = (3, 4)
GREEDY = GenerationRequest(
    PROMPT, max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
SAMPLED = replace(GREEDY, temperature=1.0, top_k=4, seed=5)
REQUESTS = {
    "greedy": GREEDY,
    **{rule: replace(SAMPLED, rejection_sampling_strategy=rule) for rule in ("strict", "residual", "block")},
}


def small_target() -> Any:
    """Its most probable continuation of the prompt has five different tokens, without a period."""
    return six_tokens(10, 1, 64)


class ObservedDraft(DraftServicer):
    """A draft that counts its pushes, and ends its sequences at some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = 0
        self.requested = 0
        """Steps that requested a proposal."""
        self.running = 0
        self.breaks_at: set[int] = set()
        """Pushes at which a sequence fails, counted over all sequences."""
        self.leaves_at: set[int] = set()
        """Pushes at which a sequence ends without an error."""

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        def on_step(step: ProposeStep) -> None:
            self.requested += step.token_count > 0

        def on_answer(answer: Answer) -> Answer:
            if isinstance(answer, Proposal):
                return answer
            self.pushes += 1
            if self.pushes in self.breaks_at:
                sequence.tell(refusal(grpc.StatusCode.UNAVAILABLE, "gone"))
            if self.pushes in self.leaves_at:
                sequence.tell(Finish(0))
            return answer

        self.running += 1
        try:
            await super().serve_sequence(hooked(sequence, on_step, on_answer))
        finally:
            self.running -= 1


@dataclass(frozen=True)
class Pair:
    """Any number of paced targets and a draft; runs coordinators over them."""

    addresses: tuple[str, str | None]
    draft: ObservedDraft

    @asynccontextmanager
    async def coordinated(
        self, ahead: DraftAhead, policy: Literal["fixed", "adaptive"] = "fixed", **more: Any
    ) -> AsyncIterator[str]:
        options: dict[str, Any] = {"speculation_policy": policy, "draft_ahead": ahead, **more}
        async with coordinated(*self.addresses, **options) as (client, service):
            yield client.address
            await until(lambda: not any(each.open_sequences for each in service.replicas.snapshots()))

    async def completed(self, ahead: DraftAhead, *requests: GenerationRequest) -> list[Completed]:
        """Complete one request after the other, each on dedicated streams."""
        async with self.coordinated(ahead) as address:
            return await complete_all(address, requests, at_once=1)


@asynccontextmanager
async def pair(
    target_model: LoadedModel,
    draft_model: LoadedModel,
    *faults: Faults,
    step_seconds: float = STEP_SECONDS,
    draft_top_k: int = 3,
    **options: Any,
) -> AsyncIterator[Pair]:
    observed = ObservedDraft()
    options |= {"servicer": observed, "draft_top_k": draft_top_k, "step_seconds": step_seconds}
    async with (
        asyncio.timeout(HANG_SECONDS),
        services(target_model, draft_model, *faults, **options) as addresses,
    ):
        yield Pair(addresses, observed)


def hits(completed: list[Completed]) -> int:
    """Return the number of rounds whose proposal was drafted ahead."""
    return sum(each.speculation.ahead.hits for each in completed)


AHEAD: tuple[DraftAhead, ...] = (1, 16)


Paced = Callable[..., AbstractAsyncContextManager[Pair]]
"""`pair` of certain models."""


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Paced:
    """The draft is the target with errors: some of what it proposes is accepted, and some is not."""
    models = small_target(), blurred(small_target(), seed=9, scale=0.2)
    folders = [save_model(each, tmp_path_factory.mktemp("model")) for each in models]
    target, drafting = (load_model(each, device=DEVICE, dtype="float32", threads=1) for each in folders)
    return partial(pair, target, drafting)


def drafted_tokens(completed: list[Completed]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return [(each.token_ids, each.drafted) for each in completed]


async def test_the_text_is_the_same_as_without_drafting_ahead(paced: Paced) -> None:
    """Under `greedy` and `strict` by the rule, under `residual` and `block` because the proposals are the same."""
    requests = list(REQUESTS.values())
    async with paced() as both:
        (alone,) = await both.completed("off", replace(GREEDY, speculation=False))
        before = await both.completed("off", *requests)
        assert both.draft.pushes == 0, "without a budget the draft pushes nothing"
        assert hits(before) == 0
        assert before[0].token_ids == alone.token_ids
        without_hit = {*REQUESTS}
        completed = before
        while without_hit:  # on a busy machine all that was drafted ahead may come too late
            for ahead in AHEAD:
                requested = both.draft.requested
                completed = await both.completed(ahead, *requests)
                assert [each.token_ids for each in completed] == [each.token_ids for each in before]
                assert drafted_tokens(completed[2:]) == drafted_tokens(before[2:])
                rounds = sum(each.speculation.rounds for each in completed)
                assert both.draft.requested - requested <= rounds - hits(completed), "a hit needs no request"
            for rule, each in zip(REQUESTS, completed, strict=True):
                if each.speculation.ahead.hits:
                    without_hit.discard(rule)
        assert not both.draft.running


@pytest.mark.parametrize("ahead", ["off", 16])
async def test_penalties_change_no_text_and_leave_the_draft_at_work(ahead: DraftAhead, paced: Paced) -> None:
    plain = [REQUESTS["greedy"], REQUESTS["strict"]]
    requests = [replace(each, presence_penalty=1.5, repetition_penalty=1.1) for each in plain]
    alone = [replace(each, speculation=False) for each in requests]
    async with paced() as both, both.coordinated(ahead, draft_model_penalties="draft") as address:
        unpenalized, found, wanted = [await complete_all(address, each) for each in (plain, requests, alone)]
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for own, other in zip(found, unpenalized, strict=True):
        assert own.speculation.accepted > 0
        assert own.token_ids != other.token_ids, "they count"


async def test_under_load_no_draft_is_lost(paced: Paced, caplog: pytest.LogCaptureFixture) -> None:
    """The draft falls behind the verifications; the adaptive policy stops proposals that do not pay, and probes."""
    rules = ("greedy", "strict")
    requests = [replace(REQUESTS[rules[i % 2]], seed=i, max_tokens=12) for i in range(16)]
    async with paced(step_seconds=0.004) as both:
        async with both.coordinated("off") as address:
            before = await complete_all(address, requests, at_once=16)
        policies: tuple[Literal["fixed", "adaptive"], ...] = ("fixed", "adaptive")
        for policy in policies:
            async with both.coordinated(16, policy) as address:
                while True:
                    completed = await complete_all(address, requests, at_once=16)
                    assert [one.token_ids for one in completed] == [one.token_ids for one in before]
                    # The adaptive policy may stop drafting. On a busy machine all outcomes may come too late.
                    if policy == "adaptive" or hits(completed):
                        break
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("fault", ["breaks_at", "leaves_at"])
async def test_losing_the_draft_during_pushes_costs_no_token(fault: str, paced: Paced) -> None:
    requests = [REQUESTS["greedy"], REQUESTS["strict"]]
    requests = [replace(request, max_tokens=40) for request in requests]
    async with paced() as both:
        before = await both.completed("off", *requests)
        getattr(both.draft, fault).update({1, 2, 5, 9, 20})
        completed = await both.completed(16, *requests)
        assert both.draft.pushes >= 5
        assert [each.token_ids for each in completed] == [each.token_ids for each in before]
        await until(lambda: not both.draft.running)


async def test_losing_the_target_with_outcomes_outstanding_costs_no_token(paced: Paced) -> None:
    requests = list(REQUESTS.values())
    faults = (Faults(), Faults())
    async with paced(*faults) as both:
        before = await both.completed("off", *requests)
        for each in faults:
            each.steps = 0
            each.after = {3, 9}
            each.before = {14}
        completed = await both.completed(16, *requests)
        assert min(each.steps for each in faults) > 3
        assert [each.token_ids for each in completed] == [each.token_ids for each in before]
        assert drafted_tokens(completed[2:]) == drafted_tokens(before[2:])
        assert hits(completed) > 0


PLACES = slice(2, 4)
"""Positions of the compared tokens, most of which come from rounds with a hit. The first token is the target's own, and
the second begins the round with the first request to the draft."""


@pytest.mark.parametrize(
    ("rule", "at_once", "step_seconds", "seeds", "distance"),
    [
        ("residual", 16, 0.08, 100, 0.45),
        ("block", 16, 0.08, 100, 0.45),
        pytest.param("residual", 16, 0.08, 1600, 0.15, marks=pytest.mark.soak),
        pytest.param("block", 1, 0.004, 1600, 0.15, marks=pytest.mark.soak),
    ],
)
async def test_the_tokens_have_the_targets_distribution(
    rule: str, at_once: int, step_seconds: float, seeds: int, distance: float, paced: Paced
) -> None:
    request = replace(REQUESTS[rule], top_k=3, max_tokens=6, num_speculative_tokens=2)
    requests = [replace(request, seed=seed) for seed in range(seeds)]
    async with (
        paced(step_seconds=step_seconds, max_sequences=16, draft_top_k=2) as both,
        both.coordinated(16) as address,
    ):
        completed = await complete_all(address, requests, at_once)
    assert hits(completed) > seeds / 4
    assert_drawn_from(exact(small_target(), request, PLACES.stop), completed, PLACES, distance)


@pytest.mark.parametrize(
    ("rules", "temperature"),
    [
        (("strict", "residual", "block"), 0.7),
        (("strict",), 1.0),
        pytest.param(("strict", "residual", "block"), 1.0, marks=pytest.mark.soak),
        pytest.param(("strict",), 0.7, marks=pytest.mark.soak),
    ],
)
async def test_so_have_those_of_a_target_that_begins_rounds_by_itself(
    rules: tuple[str, ...], temperature: float, paced: Paced
) -> None:
    """With a draft under `strict`, and alone under every rule."""
    is_alone = len(rules) > 1
    request = replace(
        SAMPLED,
        temperature=temperature,
        top_k=3,
        max_tokens=6,
        num_speculative_tokens=2,
        speculation=not is_alone,
    )
    requests = [
        replace(request, seed=seed, rejection_sampling_strategy=rules[seed % len(rules)])
        for seed in range(111)
    ]
    step_seconds = 0.0 if is_alone else 0.02
    async with (
        paced(step_seconds=step_seconds, max_sequences=16, draft_top_k=2) as both,
        both.coordinated(16) as address,
    ):
        completed = await complete_all(address, requests)
    led = sum(each.speculation.lead.rounds for each in completed)
    assert led == 5 * len(requests) if is_alone else led > 0
    expected = exact(small_target(), request, PLACES.stop)
    assert_drawn_from(expected, completed, PLACES, 0.4, is_alone=is_alone)

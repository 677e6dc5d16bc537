"""Drafting ahead changes how fast a text comes, and never the text."""

# ruff: noqa: N802 - gRPC looks a method up by the name that it has in the proto.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.speculation.ahead import DraftAhead
from draft_service.servicer import DraftServicer
from tandem.clients.aio import Client
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.serving.interceptors.handlers import Context
from tandem.types import GenerationRequest
from tandem.v1 import draft_pb2
from tests.end_to_end.chi_square import critical_value, statistic, visible_distance
from tests.end_to_end.models import blurred, random_model, save_model
from tests.service.clients import Completed, complete_all, until
from tests.service.engines import Faults, draft, target
from tests.service.fakes import coordinator, refusal

SECONDS = 120.0
STEP_SECONDS = 0.008
"""What a step of the target takes at least: the draft has that long to draft ahead."""
TOKENS = 24
PROMPT = (3, 4)

GREEDY = GenerationRequest(
    PROMPT, max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
SAMPLED = replace(GREEDY, temperature=1.0, top_k=4, seed=5)
REQUESTS = {
    "greedy": GREEDY,
    **{rule: replace(SAMPLED, rejection_sampling_strategy=rule) for rule in ("strict", "residual", "block")},
}
AHEAD: tuple[DraftAhead, ...] = (1, 4, 16)


def small_target() -> Any:
    """Six tokens and random weights, scaled up for some tokens to be far more probable than others.

    Its most probable continuation of the prompt has five different tokens, without a period.
    """
    return random_model(
        10,
        vocab_size=6,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def reference() -> Any:
    return small_target()


@pytest.fixture(scope="module")
def target_model(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_model(reference, tmp_path_factory.mktemp("target"))
    return load_model(folder, device="cpu", dtype="float32", threads=1)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target with errors: some of what it proposes is accepted, and some is not."""
    folder = save_model(blurred(small_target(), seed=9, scale=0.2), tmp_path_factory.mktemp("draft"))
    return load_model(folder, device="cpu", dtype="float32", threads=1)


class ObservedDraft(DraftServicer):
    """Counts what it says, and breaks off its streams at some of its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0
        self.pushes = 0
        self.asked = 0
        """Steps that wanted an answer."""
        self.running = 0
        self.breaks_at: set[int] = set()
        """Pushes in place of which a stream fails, counted over all streams."""
        self.leaves_at: set[int] = set()
        """Pushes in place of which a stream ends as if all were well."""

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async def observed() -> AsyncIterator[draft_pb2.ProposeRequest]:
            async for request in request_iterator:
                self.asked += request.step.token_count > 0
                yield request

        self.running += 1
        try:
            async for response in super().Propose(observed(), context):
                if response.HasField("outcomes"):
                    self.pushes += 1
                    if self.pushes in self.breaks_at:
                        raise refusal(grpc.StatusCode.UNAVAILABLE, "gone")
                    if self.pushes in self.leaves_at:
                        return
                else:
                    self.answers += 1
                yield response
        finally:
            self.running -= 1


class Pair:
    """A paced target, any number of times, and a draft; coordinators over them."""

    def __init__(self, targets: list[str], drafting: str, observed: ObservedDraft) -> None:
        self._targets = targets
        self._drafting = drafting
        self.draft = observed

    @asynccontextmanager
    async def coordinated(self, ahead: DraftAhead, drafts: int = 1) -> AsyncIterator[str]:
        settings = CoordinatorSettings(
            target_address=",".join(self._targets),
            draft_address=self._drafting,
            draft_patience_seconds=30.0,
            speculation_policy="fixed",
            draft_ahead=ahead,
        )
        async with coordinator(settings) as (address, service):
            yield address
            await until(
                lambda: not any(each.open_sequences for each in service.replicas.snapshots()), SECONDS
            )

    async def completed(self, ahead: DraftAhead, *requests: GenerationRequest) -> list[Completed]:
        """One request after the other: each has streams of its own."""
        async with self.coordinated(ahead) as address:
            return await complete_all(address, requests, at_once=1)


@asynccontextmanager
async def pair(
    target_model: LoadedModel,
    draft_model: LoadedModel,
    *faults: Faults,
    step_seconds: float = STEP_SECONDS,
    max_sequences: int = 8,
    draft_top_k: int = 3,
) -> AsyncIterator[Pair]:
    observed = ObservedDraft()
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        targets = [
            (await stack.enter_async_context(target(target_model, each, step_seconds, max_sequences)))[0]
            for each in faults or (Faults(),)
        ]
        drafting, _ = await stack.enter_async_context(
            draft(draft_model, observed, draft_top_k, max_sequences)
        )
        yield Pair(targets, drafting, observed)


def hits(completed: list[Completed]) -> int:
    return sum(each.stats.ahead.hits for each in completed)


def said(completed: list[Completed]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Tokens, and which of them the draft had proposed."""
    return [(each.token_ids, each.drafted) for each in completed]


async def test_the_text_is_that_without_drafting_ahead(
    target_model: LoadedModel, draft_model: LoadedModel
) -> None:
    """Under `greedy` and `strict` by the rule, under `residual` and `block` because the proposals are the same."""
    requests = list(REQUESTS.values())
    async with pair(target_model, draft_model) as both:
        (alone,) = await both.completed("off", replace(GREEDY, speculation=False))
        before = await both.completed("off", *requests)
        assert both.draft.pushes == 0, "a coordinator that grants nothing is told nothing"
        assert hits(before) == 0
        assert before[0].token_ids == alone.token_ids
        completed = before
        for ahead in AHEAD:
            asked = both.draft.asked
            completed = await both.completed(ahead, *requests)
            assert [each.token_ids for each in completed] == [each.token_ids for each in before]
            assert said(completed[2:]) == said(before[2:])
            assert hits(completed) > 0
            rounds = sum(each.stats.rounds for each in completed)
            assert both.draft.asked - asked <= rounds - hits(completed), "after a hit nothing is asked"
        assert all(each.stats.ahead.hits for each in completed), "each rule has hits with 16 outcomes"
        assert not both.draft.running


async def test_sequences_that_share_a_stream_have_the_same_texts(
    target_model: LoadedModel, draft_model: LoadedModel
) -> None:
    requests = [replace(request, seed=seed) for seed in (1, 2) for request in REQUESTS.values()]
    async with pair(target_model, draft_model, step_seconds=0.04) as both:
        before = await both.completed("off", *requests)
        async with both.coordinated(16) as address:
            completed = await complete_all(address, requests, at_once=len(requests))
        assert [each.token_ids for each in completed] == [each.token_ids for each in before]
        assert hits(completed) > 0
        await until(lambda: not both.draft.running, SECONDS)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("way", ["breaks_at", "leaves_at"])
async def test_a_draft_that_is_lost_while_it_pushes_costs_no_token(
    way: str, ahead: DraftAhead, target_model: LoadedModel, draft_model: LoadedModel
) -> None:
    requests = [REQUESTS["greedy"], REQUESTS["strict"]]
    requests = [replace(request, max_tokens=60) for request in requests]
    async with pair(target_model, draft_model) as both:
        before = await both.completed("off", *requests)
        getattr(both.draft, way).update({1, 2, 5, 9, 20})
        completed = await both.completed(ahead, *requests)
        assert both.draft.pushes >= 5
        assert [each.token_ids for each in completed] == [each.token_ids for each in before]
        await until(lambda: not both.draft.running, SECONDS)


async def test_a_target_that_is_lost_while_outcomes_are_outstanding_costs_no_token(
    target_model: LoadedModel, draft_model: LoadedModel
) -> None:
    requests = list(REQUESTS.values())
    faults = (Faults(), Faults())
    async with pair(target_model, draft_model, *faults) as both:
        before = await both.completed("off", *requests)
        for each in faults:
            each.steps, each.after, each.before = 0, {3, 9}, {14}
        completed = await both.completed(16, *requests)
        assert min(each.steps for each in faults) > 3
        assert [each.token_ids for each in completed] == [each.token_ids for each in before]
        assert said(completed[2:]) == said(before[2:])
        assert hits(completed) > 0


async def test_a_cancelled_request_leaves_no_stream_and_no_sequence(
    target_model: LoadedModel, draft_model: LoadedModel
) -> None:
    long = replace(SAMPLED, max_tokens=1000, seed=None)
    async with pair(target_model, draft_model) as both, both.coordinated(16) as address:
        async with Client(address) as client:

            async def begun() -> None:
                chunks = client.generate(long)
                for _ in range(6):
                    await anext(chunks)
                await chunks.aclose()

            await begun()
            await asyncio.gather(*(begun() for _ in range(4)))
        assert both.draft.pushes > 0
        await until(lambda: not both.draft.running, SECONDS)
        usage = both.draft.proposer.kv_usage()
        assert usage is not None
        await until(lambda: not both.draft.proposer.kv_usage().sequence_count, SECONDS)  # type: ignore[union-attr]


# ---- the distribution

PLACES = slice(2, 5)
"""Tokens that are compared, of which most were decided in a round whose proposal had been drafted ahead. The first is
the target's own, and the second begins the round for which the draft is asked."""


def exact(model: Any, request: GenerationRequest) -> dict[tuple[int, ...], float]:
    """The target's distribution of the tokens at these places, by transformers."""
    beginnings: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PLACES.stop):
        contexts = torch.tensor([[*PROMPT, *tokens] for tokens in beginnings])
        with torch.inference_mode():
            logits = model(contexts).logits[:, -1].double()
        top = logits.topk(request.top_k or logits.shape[-1])
        shares = top.values.softmax(dim=-1)
        beginnings = {
            (*tokens, int(token_id)): mass * float(share)
            for (tokens, mass), ids, row in zip(beginnings.items(), top.indices, shares, strict=True)
            for token_id, share in zip(ids, row, strict=True)
        }
    found: Counter[tuple[int, ...]] = Counter()
    for tokens, mass in beginnings.items():
        found[tokens[PLACES]] += mass  # type: ignore[assignment]  # typeshed counts in integers
    return dict(found)


@pytest.mark.parametrize("rule", ["residual", "block"])
@pytest.mark.parametrize(
    ("at_once", "step_seconds", "seeds", "distance"),
    [
        (1, 0.004, 120, 0.45),
        (16, 0.08, 128, 0.45),
        pytest.param(1, 0.004, 1600, 0.15, marks=pytest.mark.soak),
        pytest.param(16, 0.08, 1600, 0.15, marks=pytest.mark.soak),
    ],
)
async def test_the_tokens_are_distributed_as_the_targets(
    rule: str,
    at_once: int,
    step_seconds: float,
    seeds: int,
    distance: float,
    reference: Any,
    target_model: LoadedModel,
    draft_model: LoadedModel,
) -> None:
    """Chi-square: a deviation of the total variation distance that is given is seen with a probability above 0.99, and
    a right implementation fails with a probability of 1 in 10 000, once and for all, for the seeds are fixed."""
    request = replace(REQUESTS[rule], top_k=3, max_tokens=6, num_speculative_tokens=2)
    requests = [replace(request, seed=seed) for seed in range(seeds)]
    async with (
        pair(target_model, draft_model, step_seconds=step_seconds, max_sequences=16, draft_top_k=2) as both,
        both.coordinated(16) as address,
    ):
        completed = await complete_all(address, requests, at_once)
    assert hits(completed) > seeds / 4
    drafted = sum(each.stats.drafted for each in completed)
    accepted = sum(each.stats.accepted for each in completed)
    assert 0.1 < accepted / drafted < 0.9, "the test needs both accepted and recovered tokens"
    counts = Counter(each.token_ids[PLACES] for each in completed)
    expected = exact(reference, request)
    assert set(counts) <= set(expected)
    value, freedom = statistic(counts, expected)
    assert value < critical_value(freedom)
    assert visible_distance(seeds, freedom) < distance

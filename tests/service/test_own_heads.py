"""Targets that draft by heads of their own: the coordinator asks them to, and no text changes by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client, Completed
from tandem.model.replica import Role
from tandem.model.types import GenerationRequest, RowKind
from tandem_coordinator.service import CoordinatorService
from tandem_target.servicer import TargetServicer
from tandem_target.verifier import Verifier
from tests.end_to_end.chi_square import assert_drawn_from
from tests.end_to_end.models import exact, six_tokens
from tests.mtp_models import MtpTarget
from tests.service.clients import complete, complete_all
from tests.service.fakes import HANG_SECONDS, coordinated, serving
from tests.service.test_drafting_ahead import PLACES
from tests.unit.engine.greedy import most_probable
from tests.unit.target_service.test_head_drafter import METHODS as HEADS
from tests.unit.target_service.test_head_drafter import running, saved_target


@dataclass(frozen=True)
class Host:
    """A target with a head of its own."""

    address: str
    server: grpc.aio.Server
    verifier: Verifier


@asynccontextmanager
async def host(target: Path, head: Path | None, **settings: object) -> AsyncIterator[Host]:
    """Serve a target with its head, or with the prediction layers in its own checkpoint."""
    targets = TargetServicer()
    async with running(target, head, **({"max_length": 128} | settings)) as verifier:
        targets.verifier = verifier
        async with serving(targets) as (address, server):
            yield Host(address, server, verifier)


@asynccontextmanager
async def over(*hosts: Host, **settings: Any) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """A coordinator that knows the targets' addresses alone."""
    async with coordinated(",".join(each.address for each in hosts), **settings) as (client, service):
        yield client.address, service


def accepted(completed: Sequence[Completed]) -> int:
    """Number of tokens that the head proposed and that stayed."""
    return sum(sum(each.drafted) for each in completed)


TOKENS = 12
GREEDY = GenerationRequest(
    (3, 4), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=4, ignore_eos=True
)
STRICT = replace(GREEDY, temperature=1.0, seed=5, rejection_sampling_strategy="strict")
PROMPTS = [(1, 2, 3, 4, 5, index % 6, index // 6 % 6) * (index % 3 + 1) for index in range(4, 10)]
MANY = [replace(GREEDY, prompt=prompt) for prompt in PROMPTS]
SEEDED = [replace(STRICT, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
METHODS = ("eagle", "eagle3", "medusa", "dflash", "mtp")
OWN_LAYERS = ("mtp",)
"""Methods whose layers lie in the target's own checkpoint; with these, penalties are allowed."""
BYTES_OF_A_TOKEN = {
    **dict.fromkeys(("eagle", "eagle3", "medusa"), 4 * (6 * 2 * 24 + 48 + 2 * 16)),
    "dflash": 4 * (6 * 64 + 56 + 2 * 128),
    "mtp": 4 * (3 * 2 * 16 + 32 + 2 * 16),
}
"""The least that target and draft store of a token: numbers of four bytes."""


@dataclass(frozen=True)
class Pair:
    method: str
    model: Any
    """The target, as transformers runs it: of six tokens, so that random weights are right now and then."""
    target: Path
    draft: Path | None

    def host(self, **settings: object) -> Any:
        return host(self.target, self.draft, **settings)


FEWER_TOKENS = {"eagle3": {"draft_vocabulary": 5, "norm_output": True}, "medusa": {"draft_vocabulary": 5}}
"""Options of heads that say five of the six tokens."""


def saved(folder: Path, method: str) -> Pair:
    """Write a target and a draft for it."""
    if method in OWN_LAYERS:
        own = MtpTarget("qwen3", vocabulary=6)
        return Pair(method, own.model, own.save(folder), None)
    model = six_tokens(10, 6, 48)
    save = HEADS[method][0]
    head = save(folder / f"{method}-head", model, **FEWER_TOKENS.get(method, {}))
    return Pair(method, model, saved_target(model, folder / "target"), head)


# What depends on the method is tested for each of them; the rest with a head and with a target's own layers.
TWO_METHODS = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(method, marks=() if method in ("eagle3", "mtp") else pytest.mark.soak)
        for method in METHODS
    ],
    indirect=True,
)


@pytest.fixture(scope="module", params=METHODS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved(tmp_path_factory.mktemp("pair"), request.param)


def assert_greedy(
    pair: Pair, found: Sequence[Completed], prompts: Sequence[tuple[int, ...]] = PROMPTS
) -> None:
    """With each method, each text is the one that transformers would choose greedily."""
    for prompt, each in zip(prompts, found, strict=True):
        assert len(each.token_ids) == TOKENS
        assert list(each.token_ids) == most_probable(pair.model, prompt, each.token_ids)


async def completed(
    pair: Pair, *batches: Sequence[GenerationRequest], **settings: object
) -> tuple[list[list[Completed]], int]:
    """Complete one batch after the other, each at once; also the number of preempted sequences."""
    async with asyncio.timeout(HANG_SECONDS), pair.host(**settings) as hosted, over(hosted) as (address, _):
        found = [await complete_all(address, batch) for batch in batches]
        return found, hosted.verifier.kv_usage().preemption_count


def texts(completed: Sequence[Completed]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completed]


async def test_the_draft_is_found_and_greedy_and_seeded_texts_are_the_targets(pair: Pair) -> None:
    """One request, then six at once, then some prompts again, whose pages are reused."""
    alone = [replace(request, speculation=False) for request in SEEDED]
    batches = MANY[:1], MANY, MANY[:4], SEEDED[:1], SEEDED, alone
    hosted: Host
    async with asyncio.timeout(HANG_SECONDS), pair.host() as hosted, over(hosted) as (address, service):
        (target,) = service.replicas.snapshots()
        assert target.role is Role.TARGET
        assert target.model is not None
        assert target.model.drafting_method == pair.method
        first, second, third, seeded, together, without = [
            await complete_all(address, batch) for batch in batches
        ]
        async with Client(address) as client, AdminClient(address) as admin:
            await complete(client, replace(GREEDY, temperature=1.0, seed=1))
            penalized = await complete(client, replace(GREEDY, frequency_penalty=1.0))
            assert (penalized.speculation.drafted == 0) == (pair.draft is not None)
            rules = set((await admin.stats()).by_rule)
    # MAX has no Medusa and no DFlash, and vLLM's rule for them is lossless.
    usual = "residual" if pair.method in ("medusa", "dflash") else "typical-acceptance"
    assert rules == {"greedy", "strict", usual}
    assert_greedy(pair, second)
    assert texts([*first, *third]) == texts([second[0], *second[:4]])
    assert accepted(second) > len(MANY), "the draft was right now and then"
    assert texts(together) == texts(without)
    assert texts(seeded) == texts(without[:1])
    assert accepted(together) > 0
    assert accepted(without) == 0


@TWO_METHODS
async def test_repeated_proposals_change_no_text(pair: Pair) -> None:
    """Text of six tokens repeats itself all the time."""
    alone = [replace(request, speculation=False) for request in SEEDED]
    (many, seeded, without), _ = await completed(pair, MANY, SEEDED, alone, draft_repeats=True)
    assert_greedy(pair, many)
    assert texts(seeded) == texts(without)
    assert accepted(many) > len(MANY)
    assert accepted(seeded) > 0


@TWO_METHODS
async def test_preempted_sequences_keep_their_text(pair: Pair) -> None:
    """There are pages for a few of the sequences, which grow past their first page of 64 tokens."""
    prompts = [(*prompt * 8,)[:56] for prompt in PROMPTS]
    room = 8 * 64 * BYTES_OF_A_TOKEN[pair.method]
    requests = [replace(GREEDY, prompt=prompt) for prompt in prompts]
    (found,), preemptions = await completed(pair, requests, kv_cache_memory_bytes=room)
    assert_greedy(pair, found, prompts)
    assert preemptions > 0
    assert accepted(found) > 0 or pair.method in OWN_LAYERS
    assert sum(each.speculation.drafted for each in found) > 0


@TWO_METHODS
async def test_residual_sampling_keeps_the_targets_distribution(pair: Pair) -> None:
    rule = replace(
        STRICT, rejection_sampling_strategy="residual", top_k=3, max_tokens=5, num_speculative_tokens=2
    )
    if pair.method == "dflash":
        rule = replace(rule, temperature=3.0)  # both accept and reject often enough then
    some = replace(rule, allowed_token_ids=(0, 2, 3, 5))
    seeds = range(100)
    (found, allowed), _ = await completed(
        pair, *([replace(each, seed=seed) for seed in seeds] for each in (rule, some))
    )
    assert_drawn_from(exact(pair.model, rule, PLACES.stop), found, PLACES, 0.45)
    assert {token_id for each in allowed for token_id in each.token_ids} <= {0, 2, 3, 5}
    assert sum(each.speculation.drafted for each in allowed) > 0
    assert_drawn_from(exact(pair.model, some, PLACES.stop), allowed, PLACES, 0.5)


@TWO_METHODS
async def test_a_lost_target_takes_its_draft_along_and_the_text_stays(pair: Pair) -> None:
    """Requests over two targets with drafts, one of which dies; each goes on with the other target and its draft."""
    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host() as first,
        pair.host() as second,
        over(first, second) as (address, service),
        Client(address) as client,
    ):
        begun = asyncio.Event()
        running = [asyncio.create_task(complete(client, request, begun)) for request in MANY]
        await begun.wait()
        await first.server.stop(None)
        found = await asyncio.gather(*running)
        targets = {each.address: each for each in service.replicas.snapshots()}
    assert_greedy(pair, found)
    assert targets[second.address].figures.accepted > 0


RULES = ("strict", "residual", "block", "typical-acceptance")
LED = [GREEDY, *(replace(STRICT, rejection_sampling_strategy=rule) for rule in RULES)]
"""A request for each rule by which a target may lead, with a seed that promises its text."""


@TWO_METHODS
@pytest.mark.parametrize("lead", [1, 4])
async def test_the_text_and_what_is_proposed_do_not_depend_on_the_lead(pair: Pair, lead: int) -> None:
    """All rounds but the first, which reads the prompt, begin by themselves."""
    # A lossy rule is allowed where the operator chose it.
    options = {"speculation_policy": "fixed", "rejection_sampling_strategy": "typical-acceptance"}
    async with asyncio.timeout(HANG_SECONDS), pair.host() as hosted:
        async with over(hosted, target_lead=0, **options) as (address, _):
            asked = await complete_all(address, LED)
        async with over(hosted, target_lead=lead, **options) as (address, _):
            led = await complete_all(address, LED)
        usage = hosted.verifier.kv_usage()
    assert texts(led) == texts(asked)
    for before, after in zip(asked, led, strict=True):
        one = before.speculation
        other = after.speculation
        assert (one.rounds, one.drafted, one.accepted) == (other.rounds, other.drafted, other.accepted)
        assert one.lead.rounds == 0
        assert other.lead.rounds == other.rounds - 1
        assert other.lead.wasted == 0, "the target knows where the text ends, and decides as the rule does"
    assert usage.led_step_count > 0
    assert usage.wasted_step_count == 0


LONG = [
    replace(request, max_tokens=60, num_speculative_tokens=None, rejection_sampling_strategy=None)
    for request in SEEDED
]
"""Requests that leave the rule and the number of tokens to the coordinator."""


async def complete_asking(
    pair: Pair, rule: str, lead: int, requests: Sequence[GenerationRequest] = LONG, **options: Any
) -> list[Completed]:
    """Complete requests by a rule by which a target may not lead, whatever lead it is given."""
    options |= {"rejection_sampling_strategy": rule, "speculation_policy": "fixed", "target_lead": lead}
    async with asyncio.timeout(HANG_SECONDS), pair.host() as hosted:
        async with over(hosted, **options) as (address, _):
            found = await complete_all(address, requests)
        usage = hosted.verifier.kv_usage()
    assert (usage.led_step_count, usage.wasted_step_count) == (0, 0)
    for each in found:
        stats = each.speculation
        assert (stats.lead.rounds, stats.lead.wasted) == (0, 0)
        assert len(each.token_ids) == 60
        assert set(each.token_ids) <= set(range(6))
        assert sum(each.drafted) == stats.accepted
        # Logit comparison adds no token of the target's where all that was proposed stays
        whole = stats.positions[-1].accepted + 1 if rule == "logit-comparison" else 0
        assert 0 <= stats.rounds + stats.accepted - 60 <= whole
        assert stats.accepted < stats.drafted
    return found


@TWO_METHODS
async def test_logit_comparison_asks_for_each_proposal(pair: Pair) -> None:
    """It compares logits that only an asked step brings; its text does not depend on the lead that is allowed."""
    found = await complete_asking(pair, "logit-comparison", lead=4, num_speculative_tokens=3)
    again = await complete_asking(pair, "logit-comparison", lead=0, num_speculative_tokens=3)
    assert texts(found) == texts(again)
    for one, other in zip(found, again, strict=True):
        assert one.drafted == other.drafted
    assert accepted(found) > 0


@TWO_METHODS
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rate", [0.3, 0.8])
async def test_synthetic_acceptance_has_the_rate_that_is_asked_for(
    pair: Pair, rate: float, count: int
) -> None:
    found = await complete_asking(
        pair, "synthetic", lead=4, num_speculative_tokens=count, synthetic_acceptance_rate=rate
    )
    drafted = sum(each.speculation.drafted for each in found)
    # The share of a round's tokens that are accepted has at most the deviation of one of them. Proposals before the
    # end of a text are shorter than others, and are accepted rather more often.
    rounds = drafted / count
    tolerance = 4 * (rate * (1 - rate) / rounds) ** 0.5
    assert abs(accepted(found) / drafted - rate) < tolerance


@TWO_METHODS
async def test_what_only_the_coordinator_knows_costs_steps_and_no_text(pair: Pair) -> None:
    """Stop strings end the text wherever they lie in a lead; the target goes on until it learns of it."""
    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host() as hosted,
        over(hosted, target_lead=4) as (address, service),
    ):
        (whole,) = await complete_all(address, [GREEDY])
        stops = [whole.text[start : start + 3] for start in range(len(whole.text) - 3)]
        requests = [replace(GREEDY, stop=(stop,)) for stop in stops]
        stopped = await complete_all(address, requests)
        wasted = service.completions.stats.snapshot()[0].lead.wasted
        alone = await complete_all(address, [replace(each, speculation=False) for each in requests])
    assert [each.text for each in stopped] == [each.text for each in alone]
    assert 0 < wasted <= 4 * len(stops)


@TWO_METHODS
async def test_requests_of_every_kind_have_the_text_that_they_have_alone(pair: Pair) -> None:
    """Biases, a minimum, ids that end the text, log probabilities, rows and lengths: with a head and without one."""
    kinds = [
        replace(STRICT, logit_bias={3: 2.0, 4: -100.0}),
        replace(STRICT, min_tokens=9, ignore_eos=False, stop_token_ids=(2, 5)),
        replace(STRICT, stop_token_ids=(1,)),
        replace(STRICT, allowed_token_ids=(0, 2, 5)),
        replace(STRICT, prompt_logprobs=2, priority=3),
        replace(STRICT, truncate_prompt_tokens=1),
        replace(STRICT, top_k=3),
        replace(STRICT, top_p=0.8, temperature=1.4),
        replace(STRICT, logprobs=2),
        replace(STRICT, max_tokens=1),
        replace(STRICT, max_tokens=2),
        replace(GREEDY, row_kind=RowKind.SUPPORT),
        replace(STRICT, num_speculative_tokens=1),
        replace(STRICT, num_speculative_tokens=9),
    ]
    alone = [replace(request, speculation=False) for request in kinds]
    (with_head, without), _ = await completed(pair, kinds, alone)
    assert texts(with_head) == texts(without)
    assert sum(each.speculation.drafted for each in with_head) > 0


async def test_lengths_by_load_and_pauses_hold_for_heads(tmp_path: Path) -> None:
    """Two tokens for one request, none for more: the head rests, and reads later what it missed."""
    pair = saved(tmp_path, "eagle3")
    policy = [[1, 1, 2], [2, 64, 0]]
    async with (
        asyncio.timeout(HANG_SECONDS),
        pair.host() as hosted,
        over(hosted, speculation_policy=policy, target_lead=2) as (address, _),
    ):
        (first,) = await complete_all(address, [GREEDY])
        many = await complete_all(address, MANY)
        (last,) = await complete_all(address, [GREEDY])
    assert_greedy(pair, many)
    assert first.token_ids == last.token_ids
    assert first.speculation.drafted == last.speculation.drafted > 0
    # The last of them may be alone for some rounds.
    assert sum(each.speculation.drafted for each in many) < sum(each.speculation.rounds for each in many)


async def test_penalized_text_does_not_depend_on_a_head(tmp_path: Path) -> None:
    penalized = [replace(each, repetition_penalty=1.2, presence_penalty=0.5) for each in [*SEEDED, GREEDY]]
    alone = [replace(request, speculation=False) for request in penalized]
    own = saved(tmp_path, "eagle3")
    async with (
        asyncio.timeout(HANG_SECONDS),
        own.host() as hosted,
        over(hosted, draft_model_penalties="draft") as (address, _),
    ):
        with_head, without = [await complete_all(address, batch) for batch in (penalized, alone)]
    assert texts(with_head) == texts(without)
    assert accepted(with_head) > 0


async def test_penalized_text_does_not_depend_on_the_targets_own_layers(tmp_path: Path) -> None:
    plain = [*SEEDED[:4], GREEDY]
    penalized = [replace(each, frequency_penalty=1.0, presence_penalty=0.5) for each in plain]
    alone = [replace(request, speculation=False) for request in penalized]
    (unpenalized, with_layer, without), _ = await completed(
        saved(tmp_path, "mtp"), plain[:1], penalized, alone
    )
    assert texts(with_layer) == texts(without)
    assert accepted(with_layer) > 0, "penalties leave the layer at work"
    assert texts(with_layer[:1]) != texts(unpenalized), "and they count"

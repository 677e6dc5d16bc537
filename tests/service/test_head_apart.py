"""A head on a device of its own reads the target's hidden states over the wire.

No text changes by it, and states that it cannot use leave it without a proposal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tandem.clients.client import Client, Completed
from tandem.errors import CapacityError
from tandem.model.types import MAX_FEATURE_BYTES, GenerationRequest, HiddenStates, Proposal, ProposeStep
from tandem_draft.proposers.head_apart import HeadProposer, HeadSequence, load_head_apart
from tandem_draft.servicer import DraftServicer
from tandem_draft.settings import DraftSettings
from tandem_target.loading import load_verifier
from tandem_target.servicer import TargetServicer
from tandem_target.settings import TargetSettings
from tandem_target.verifier import Verifier
from tests.paths import ROOT
from tests.service.clients import complete, until
from tests.service.fakes import HANG_SECONDS, coordinated, serving

DEMO = ROOT / "models" / "demo"
TARGET = DEMO / "target"
HEAD = DEMO / "eagle3"
COMMON: dict[str, Any] = {"threads": 1, "max_length": 1024, "compile": "off", "dtype": "float32"}
TOKENS = 48
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        for line in file:\n"
GREEDY = GenerationRequest(
    PROMPT, max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=4, ignore_eos=True
)
RULES = {
    "greedy": GREEDY,
    "strict": replace(GREEDY, temperature=0.7, seed=3, rejection_sampling_strategy="strict"),
}


@dataclass(frozen=True)
class Services:
    target: str
    draft: str
    verifier: Verifier
    proposer: HeadProposer


@asynccontextmanager
async def services(**head: Any) -> AsyncIterator[Services]:
    """The demo's target and its head, each behind a server of its own."""
    targets = TargetServicer()
    drafts = DraftServicer()
    verifier = load_verifier(TargetSettings(model=TARGET, features="eagle3", head=HEAD, **COMMON))
    own: dict[str, Any] = {"model": HEAD, "target_features": True, "target_model": TARGET}
    settings = DraftSettings(**(own | COMMON | head))
    proposer = load_head_apart(settings)
    targets.verifier = verifier
    drafts.proposer = proposer
    async with asyncio.timeout(HANG_SECONDS), AsyncExitStack() as stack:
        for each in (verifier, proposer):
            stack.push_async_callback(each.close)
            await each.start()
        target, _ = await stack.enter_async_context(serving(targets))
        draft, _ = await stack.enter_async_context(serving(drafts))
        yield Services(target, draft, verifier, proposer)


async def completed(own: Services, *requests: GenerationRequest, **options: Any) -> list[Completed]:
    """Complete requests at once, with proposals of a fixed length."""
    fixed = {"speculation_policy": "fixed", "draft_ahead": "off"} | options
    async with coordinated(own.target, own.draft, **fixed) as (client, _):
        return await complete_each(client, requests)


async def complete_each(client: Client, requests: Sequence[GenerationRequest]) -> list[Completed]:
    return await asyncio.gather(*(complete(client, request) for request in requests))


def accepted(found: Sequence[Completed]) -> int:
    return sum(sum(each.drafted) for each in found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ahead", ["off", 8])
async def test_texts_are_the_targets_own(rule: str, ahead: str | int) -> None:
    requests = [replace(RULES[rule], prompt=PROMPT + word) for word in ("", "        if line", "x = ")]
    async with services() as own:
        alone = await completed(own, *[replace(each, speculation=False) for each in requests])
        with_head = await completed(own, *requests, draft_ahead=ahead)
        await until(lambda: own.proposer.kv_usage().sequence_count == 0)
    assert [each.token_ids for each in with_head] == [each.token_ids for each in alone]
    assert accepted(with_head) > 0.4 * len(requests) * TOKENS
    hits = sum(each.summary.speculation.ahead.hits for each in with_head)
    assert (hits > 0) == (ahead != "off")


@pytest.mark.parametrize("rule", RULES)
async def test_asked_each_round_it_proposes_what_it_would_beside_the_target(rule: str) -> None:
    """It reads the same states with the same noise, so the same tokens are accepted in the same rounds."""
    requests = [replace(RULES[rule], prompt=PROMPT + word) for word in ("", "        if line", "x = ")]
    async with services() as own:
        apart = await completed(own, *requests)
    settings = TargetSettings(model=TARGET, draft_model=HEAD, draft_repeats=False, **COMMON)
    servicer = TargetServicer()
    servicer.verifier = load_verifier(settings)
    await servicer.verifier.start()
    try:
        async with serving(servicer) as (address, _):
            fixed = {"speculation_policy": "fixed", "rejection_sampling_strategy": "strict"}
            async with coordinated(address, **fixed) as (client, _):
                beside = await complete_each(client, requests)
    finally:
        await servicer.verifier.close()
    assert [each.token_ids for each in apart] == [each.token_ids for each in beside]
    assert [each.drafted for each in apart] == [each.drafted for each in beside]


async def test_sampled_texts_under_residual_have_accepted_tokens() -> None:
    request = replace(GREEDY, temperature=0.7, seed=5, rejection_sampling_strategy="residual")
    async with services() as own:
        [found] = await completed(own, request)
    assert accepted([found]) > TOKENS / 3


@pytest.mark.parametrize("window", [0, 16])
async def test_a_window_of_the_prompts_states(window: int) -> None:
    async with services(draft_feature_window=window) as own:
        [alone] = await completed(own, replace(GREEDY, speculation=False))
        [found] = await completed(own, GREEDY)
    assert found.token_ids == alone.token_ids
    assert accepted([found]) > TOKENS / 4


async def test_a_cached_prefix_has_its_states() -> None:
    """They lie in the pages of the target's cache, so the second request has as many accepted tokens as the first."""
    async with services() as own:
        fixed = {"speculation_policy": "fixed", "draft_ahead": "off"}
        async with coordinated(own.target, own.draft, **fixed) as (client, _):
            first = await complete(client, replace(GREEDY, prompt=PROMPT * 4))
            second = await complete(client, replace(GREEDY, prompt=PROMPT * 4))
    assert second.summary.cached_tokens
    assert second.token_ids == first.token_ids
    assert accepted([second]) == accepted([first])


async def test_each_position_is_sent_once_and_long_prompts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 the target knows which positions stay."""
    taken: list[HiddenStates] = []
    take = HeadSequence.take_states

    def note(sequence: HeadSequence, states: HiddenStates) -> None:
        taken.append(states)
        take(sequence, states)

    monkeypatch.setattr(HeadSequence, "take_states", note)
    async with services() as own:
        [found] = await completed(own, replace(GREEDY, prompt=PROMPT * 12))
    positions = [
        at for each in taken for at in range(each.first_position, each.first_position + each.shape[0])
    ]
    assert positions == list(range(len(positions)))
    # Nobody asks for anything behind the last round
    length = found.summary.prompt_tokens + TOKENS
    assert length - 8 <= len(positions) < length
    assert max(len(each.data) for each in taken) <= MAX_FEATURE_BYTES
    assert len(taken) > len(positions) * 320 * 4 / MAX_FEATURE_BYTES


@pytest.mark.parametrize("ahead", ["off", 8])
async def test_a_draft_that_begins_anew_goes_without_the_states_before(
    ahead: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not sent again: it drafts by those of the rounds that follow."""
    starts: list[int] = []
    steps: list[HeadSequence] = []
    propose = HeadSequence.propose
    take = HeadSequence.take_states

    async def fail_once(sequence: HeadSequence, step: ProposeStep) -> Proposal | None:
        steps.append(sequence)
        if len(steps) == 6:
            raise CapacityError("this sequence has to go")
        return await propose(sequence, step)

    def note(sequence: HeadSequence, states: HiddenStates) -> None:
        if sequence.buffer.start < 0:
            starts.append(states.first_position)
        take(sequence, states)

    monkeypatch.setattr(HeadSequence, "propose", fail_once)
    monkeypatch.setattr(HeadSequence, "take_states", note)
    request = replace(GREEDY, max_tokens=240)
    async with services() as own:
        [alone] = await completed(own, replace(request, speculation=False))
        [found] = await completed(own, request, draft_ahead=ahead)
    assert found.token_ids == alone.token_ids
    assert starts[0] == 0
    assert len(starts) > 1
    assert min(starts[1:]) > found.summary.prompt_tokens
    later = found.drafted[len(found.drafted) // 2 :]
    assert sum(later) > len(later) / 4


def _with_nan(states: HiddenStates) -> HiddenStates:
    return replace(states, data=b"\xff" * len(states.data))


FAULTS: dict[str, tuple[Callable[[HiddenStates], HiddenStates | None], str]] = {
    "another head": (lambda states: replace(states, head="0" * 64), "for the head"),
    "another dtype": (lambda states: replace(states, dtype="float16"), "must be float32"),
    "an unknown dtype": (lambda states: replace(states, dtype="data type 9"), "must be float32"),
    "layers": (lambda states: replace(states, layer_ids=(1, 3, 5)), "must be projected"),
    "too few bytes": (lambda states: replace(states, data=states.data[:-4]), "bytes came for"),
    "another width": (
        lambda states: replace(states, shape=(states.shape[0], states.shape[1] - 1)),
        "bytes came for",
    ),
    "NaN": (_with_nan, "not finite"),
    "missing": (lambda states: None, "missing"),
    "a gap": (
        lambda states: replace(states, first_position=states.first_position + (states.first_position > 0)),
        "they begin at position",
    ),
    "too many": (lambda states: replace(states, first_position=1 << 20), "too many"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ahead", ["off", 8])
async def test_states_that_cannot_be_used_cost_the_draft_and_nothing_else(
    fault: str, ahead: str | int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = FAULTS[fault]
    take = HeadSequence.take_states

    def take_changed(sequence: HeadSequence, states: HiddenStates) -> None:
        if (changed := change(states)) is not None:
            take(sequence, changed)

    async with services() as own:
        [alone] = await completed(own, replace(GREEDY, speculation=False))
        monkeypatch.setattr(HeadSequence, "take_states", take_changed)
        with caplog.at_level(logging.WARNING):
            [found] = await completed(own, GREEDY, draft_ahead=ahead)
    assert found.token_ids == alone.token_ids
    lines = [record for record in caplog.records if "hidden states" in record.getMessage()]
    assert len(lines) == 1
    assert words in lines[0].reason  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if record.getMessage() == "draft lost"]


async def test_a_target_that_sends_no_states_is_told_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """The draft is not used, since models that do not fit are refused before they draft."""
    async with services() as own:
        plain = load_verifier(TargetSettings(model=TARGET, **COMMON))
        servicer = TargetServicer()
        servicer.verifier = plain
        await plain.start()
        try:
            async with serving(servicer) as (address, _):
                with pytest.raises(Exception, match="reads hidden states"):
                    await completed(replace(own, target=address), GREEDY)
        finally:
            await plain.close()

"""The plug-in between a stand-in of vLLM and drafts on real gRPC: right proposals, and no step that is hurt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import vllm_stub
from tandem.model.types import DraftOptions, Proposal, RowKind, SparseDistribution, StepProfile
from tandem_coordinator.replicas.pool import Pool
from tandem_coordinator.transport.draft_client import DraftClient, PendingOutcomes
from tandem_draft.proposers.suffix import suffix_proposer
from tandem_draft.servicer import DraftedFor, DraftServicer
from tandem_vllm import TandemProposer
from tests.end_to_end.processes import read
from tests.service.clients import until
from tests.service.engines import model_free
from tests.service.fakes import FakeDraft, counting, served, serving
from tests.service.test_ahead_fakes import AheadDraft
from vllm_stub import TOKEN_COUNT, Request, Runner, disturbance, fitting, hashed, plugged, run, steps_of

TOKEN = "a-token-of-many-characters"


class CheckedRunner(Runner):
    """Every proposal must be what the draft says of that row's tokens."""

    def step(self, proposer: object) -> None:
        super().step(proposer)
        for request in self.requests:
            assert request.proposal == _continuation(request.tokens, len(request.proposal))


def _continuation(tokens: Sequence[int], count: int) -> list[int]:
    following: list[int] = []
    for _ in range(count):
        following.append(hashed([*tokens, *following]))
    return following


def mostly_right(tokens: Sequence[int]) -> int:
    """Return the draft's token, but every fourth time another one."""
    token_id = hashed(tokens)
    return (token_id + 1) % 2048 if token_id % 4 == 0 else token_id


@pytest.mark.parametrize("seed", range(3))
async def test_every_proposal_extends_the_right_tokens(seed: int) -> None:
    draft = fitting(FakeDraft(hashed))
    runner = CheckedRunner(mostly_right)
    async with served(draft) as (one,):
        async with plugged(one.address) as proposer:
            disturbed = disturbance(runner, seed)
            for _ in range(12):
                disturbed()
            await run(proposer, runner, 90, disturbed)
            assert runner.accepted > 50, "the drafts were hardly used"
        await until(lambda: not draft.running)


class UnsureDraft(FakeDraft):
    """Gives each token that it proposes a probability of 0.75."""

    def __init__(self) -> None:
        super().__init__(hashed)
        self.options: list[DraftOptions] = []

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.options.append(sequence.options)
        await super().serve_sequence(sequence)

    def proposal(self, tokens: Sequence[int], count: int) -> Proposal:
        sure = super().proposal(tokens, count)
        spread = tuple(
            SparseDistribution(np.array([token_id, (token_id + 1) % 2048]), np.array([0.75, 0.25]))
            for token_id in sure.token_ids
        )
        return replace(sure, distributions=spread)


async def test_each_requests_distributions_are_given_to_vllm_by_its_name() -> None:
    draft = fitting(UnsureDraft())
    runner = CheckedRunner(hashed)
    async with plugged(draft) as proposer:
        runner.requests = [Request([1, 2], temperature=0.7), Request([3]), Request([4], temperature=1.0)]
        await run(proposer, runner, 1)
        runner.requests.reverse()
        await run(proposer, runner, 1)
        while any(len(request.proposal) < TOKEN_COUNT for request in runner.requests):
            await run(proposer, runner, 1)  # a draft that still reads a prompt is not waited for
        found = proposer._runner
        assert found._draft_prob_req_ids == [request.name for request in runner.requests]
        assert found._draft_probs.shape == (3, TOKEN_COUNT, 2048)
        for row, request in zip(found._draft_probs, runner.requests, strict=True):
            assert len(request.proposal) == TOKEN_COUNT
            for probs, token_id in zip(row, request.proposal, strict=True):
                assert probs[token_id] == 0.75
                assert probs.sum() == 1.0
    asked = {options.sampling.temperature: options.row_kind for options in draft.options}
    assert asked == {0.7: RowKind.SUPPORT, 0.0: RowKind.TOKEN, 1.0: RowKind.SUPPORT}
    assert all(options.noise_is_unknown for options in draft.options)


async def test_a_name_that_comes_again_is_another_request() -> None:
    draft = fitting(FakeDraft(hashed))
    runner = CheckedRunner(hashed)
    async with plugged(draft) as proposer:
        for number, first in enumerate((1, 9), 1):
            runner.requests = [Request([first, 2, 3], name="same")]
            while (
                runner.accepted < number * TOKEN_COUNT
            ):  # a draft that still reads the prompt is not waited for
                await run(proposer, runner, 1)
        await until(lambda: draft.running == 1)
        assert draft.opened == 2
        assert runner.accepted == 2 * TOKEN_COUNT


async def test_ended_sequences_are_finished_on_the_draft() -> None:
    draft = fitting(FakeDraft(hashed))
    runner = Runner(hashed)
    async with plugged(draft) as proposer:
        runner.requests = [Request([1, 2, index]) for index in range(8)]
        await run(proposer, runner, 3)
        assert draft.running == 8
        del runner.requests[2:]
        await run(proposer, runner, 1)
        await until(lambda: draft.running == 2)
        assert steps_of(proposer).link.open_sequences == 2


async def test_outcomes_drafted_ahead_answer_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = fitting(AheadDraft())
    runner = Runner(counting)
    arrived = 0
    add = PendingOutcomes.add

    def counted(*arguments: Any) -> bool:
        nonlocal arrived
        arrived += 1
        return add(*arguments)

    monkeypatch.setattr(PendingOutcomes, "add", counted)
    async with plugged(draft, ahead="4") as proposer:
        runner.requests = [Request([10])]
        while not runner.proposed:  # a draft that still reads the prompt is not waited for
            await run(proposer, runner, 1)
        asked = len(draft.requested)
        for number in range(1, 8):
            await until(lambda number=number: arrived == TOKEN_COUNT * number)  # type: ignore[misc]
            await run(proposer, runner, 1)
        counts = steps_of(proposer).counts
        assert len(draft.requested) == asked, "it was asked although the outcomes were there"
        assert counts.hits == counts.awaited_outcomes == 7
        assert runner.accepted == 7 * TOKEN_COUNT


class StoppableDraft(FakeDraft):
    """Answers nothing while it is stopped."""

    def __init__(self) -> None:
        super().__init__(hashed)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def respond(self, tokens: Sequence[int], count: int) -> Proposal | None:
        await self.goes_on.wait()
        return self.proposal(tokens, count)


async def test_no_step_waits_longer_than_the_patience_for_a_stopped_draft() -> None:
    draft = StoppableDraft()
    runner = CheckedRunner(hashed)
    fitting(draft)
    async with plugged(draft, patience=0.2) as proposer:
        runner.requests = [Request([1, index]) for index in range(16)]
        await run(proposer, runner, 4)
        before = runner.accepted
        assert before > 0
        draft.goes_on.clear()
        await run(proposer, runner, 10)
        counts = steps_of(proposer).counts
        assert counts.timed_out_steps == 1, "what is late already was waited for again"
        draft.goes_on.set()
        before = runner.accepted
        await run(proposer, runner, 4)
        assert runner.accepted > before, "sequences whose draft was late once are not drafted for again"


async def test_a_sequence_that_has_its_place_on_a_full_draft_is_waited_for() -> None:
    draft = fitting(FakeDraft(hashed))
    runner = CheckedRunner(hashed)
    draft.is_full = True
    async with plugged(draft) as proposer:
        for first in range(8):
            runner.requests = [Request([first, 2, 3])]
            await run(proposer, runner, 4)
        counts = steps_of(proposer).counts
        assert counts.timed_out_steps == 0, "a step did not wait for a draft that had read the prompt"
        assert runner.accepted > 0


@pytest.mark.parametrize("is_killed", [True, False])
async def test_requests_go_on_with_the_next_draft_when_one_is_killed_or_drains(is_killed: bool) -> None:
    drafts = [fitting(FakeDraft(hashed)), fitting(FakeDraft(hashed))]
    runner = CheckedRunner(hashed)
    async with served(*drafts) as (one, other), plugged(one.address, other.address) as proposer:
        pool = await _both_ready(proposer)
        runner.requests = [Request([1, index]) for index in range(16)]
        await run(proposer, runner, 3)
        assert [draft.running for draft in drafts] == [8, 8]
        if is_killed:
            await one.stop()
        else:
            loop = steps_of(proposer).link._loop
            assert loop is not None
            loop.call_soon_threadsafe(pool.drain, one.address)
        await run(proposer, runner, 4)
        await until(lambda: drafts[1].running == 16)
        before = runner.accepted
        await run(proposer, runner, 3)
        assert runner.accepted - before > 2 * 16 * TOKEN_COUNT, "some sequences have no draft"


async def test_a_request_goes_to_the_draft_that_has_read_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though that draft has more sequences: one more takes it a millisecond, and reading the beginning seconds."""
    monkeypatch.setattr(vllm_stub, "MAX_LENGTH", 256)
    profile = StepProfile({(1, 1): 0.010, (4, 1): 0.011, (1, 64): 6.4}, 1)
    drafts = fitting(FakeDraft(hashed)), fitting(FakeDraft(hashed))
    for draft in drafts:
        draft.model_info = replace(draft.model_info, max_length=256, step_profile=profile)
    runner = CheckedRunner(hashed)
    async with plugged(*drafts, SHARE_BETWEEN_CALLERS="prefix") as proposer:
        await _both_ready(proposer)

        async def placed(prompt: list[int]) -> list[int]:
            runner.requests.append(Request(prompt))
            await run(proposer, runner, 3)
            return [draft.running for draft in drafts]

        first = await placed([7] * 72)
        assert sorted(first) == [0, 1]
        assert await placed([7] * 71 + [8]) == [2 * count for count in first]
        # A text with another beginning goes to the draft that has less to do
        assert sorted(await placed([9] * 72)) == [1, 2]
        assert runner.accepted > 0


class EndsCounted(DraftServicer):
    """Counts the sequences that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = 0

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        await super().serve_sequence(sequence)
        self._ended += 1

    def has_ended(self, count: int) -> bool:
        return self._ended == count


@pytest.mark.parametrize(
    ("salts", "options", "learns"),
    [
        ((None, None), {}, False),
        (("a", "b"), {}, False),
        (("a", None), {}, False),
        (("a", "a"), {}, True),
        ((None, None), {"SHARE_BETWEEN_CALLERS": "suffix,prefix"}, True),
        ((None, None), {"SHARE_BETWEEN_CALLERS": "prefix"}, False),
        (("a", "b"), {"SHARE_BETWEEN_CALLERS": "suffix"}, False),
    ],
)
async def test_a_pool_serves_each_request_alone_unless_a_salt_or_the_operator_groups_them(
    salts: tuple[str | None, str | None], options: dict[str, Any], *, learns: bool
) -> None:
    """A second request for the same text is proposed what the first one was told only if the two share."""
    servicer = EndsCounted()
    model_free(suffix_proposer, servicer)
    accepted = []
    async with serving(servicer) as (address, _), plugged(address, **options) as proposer:
        for number, salt in enumerate(salts, 1):
            runner = Runner(hashed)
            runner.requests = [Request([5, 6, 7], salt=salt)]
            await run(proposer, runner, 20)
            runner.requests = []
            await run(proposer, runner, 1)
            await until(partial(servicer.has_ended, number))
            accepted.append(runner.accepted)
    # No text of the stand-in repeats itself
    assert accepted[0] == 0
    assert (accepted[1] > 0) == learns


async def _both_ready(proposer: TandemProposer) -> Pool[DraftClient]:
    pool = steps_of(proposer).link._pool
    assert pool is not None
    await until(lambda: all(member.is_ready for member in pool.members.values()))
    return pool


async def test_without_any_draft_every_step_is_vllms_own(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(hashed)
    async with plugged("127.0.0.1:1", START_WAIT_SECONDS="0.2") as proposer:
        runner.requests = [Request([1, index]) for index in range(16)]
        await run(proposer, runner, 20)
        assert runner.proposed == 0
        assert steps_of(proposer).counts.timed_out_steps == 0
    assert "proposes nothing until a draft is ready" in caplog.text


class WrongDraft(FakeDraft):
    """Proposes ids that no vocabulary has."""

    def proposal(self, tokens: Sequence[int], count: int) -> Proposal:
        return replace(super().proposal(tokens, count), token_ids=(1 << 20,) * count)


async def test_a_draft_that_breaks_the_protocol_costs_proposals_only() -> None:
    draft = fitting(WrongDraft(hashed))
    runner = Runner(hashed)
    async with plugged(draft) as proposer:
        runner.requests = [Request([1])]
        await run(proposer, runner, 10)
        assert runner.proposed == 0
        assert steps_of(proposer).counts.lost_drafts >= 1


@pytest.mark.parametrize(("token", "is_used"), [(TOKEN, True), ("another-token-as-long", False)])
async def test_the_drafts_token_is_sent(token: str, is_used: bool) -> None:
    draft = fitting(FakeDraft(hashed))
    runner = Runner(hashed)
    async with plugged(draft, auth_token=TOKEN, SERVICE_TOKEN=token, START_WAIT_SECONDS="1") as proposer:
        runner.requests = [Request([1])]
        await run(proposer, runner, 4)
        assert (runner.proposed > 0) is is_used


async def test_metrics_tell_what_was_proposed() -> None:
    draft = fitting(FakeDraft(hashed))
    runner = Runner(hashed)
    async with plugged(draft, PROMETHEUS_PORT="0") as proposer:
        runner.requests = [Request([1])]
        await run(proposer, runner, 5)
        report = steps_of(proposer)._report
        assert report is not None
        text = await asyncio.to_thread(read, f"http://127.0.0.1:{report.prometheus_port}/metrics")
    assert f"tandem_vllm_proposed_tokens_total {float(runner.proposed)}" in text
    assert "tandem_vllm_wait_seconds_count 5.0" in text

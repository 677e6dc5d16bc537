"""The round loop emits the target's text whatever the draft proposes; its waits follow from measurements."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.acceptance.rounds import KEYED, Round
from tandem.acceptance.rules import greedy
from tandem.model.types import (
    Acceptance,
    Chunk,
    NextToken,
    Proposal,
    SamplingParams,
    StepCost,
    TokenRow,
    Verification,
)
from tandem_coordinator.decoding.completion import Completion, Detokenizer, Limits, StopStrings
from tandem_coordinator.decoding.loop import generate
from tandem_coordinator.decoding.rounds import RequestRounds
from tandem_coordinator.decoding.tokenization import read_tokenizer
from tandem_coordinator.stats.rounds import RoundCost, RoundResult
from tests.paths import DEMO_TARGET

ANSWER = Verification(0, ())


def test_the_wait_ends_a_few_verifications_after_the_usual_time() -> None:
    timings = RequestRounds()
    timings.verified(9.0, 0, ANSWER, is_first=True)
    timings.verified(0.1, 4, ANSWER, is_first=False)
    timings.drafted(0.2, None)
    assert timings.patience_seconds == pytest.approx(0.6)


def test_the_first_answer_counts_only_while_there_is_no_other() -> None:
    timings = RequestRounds()
    timings.verified(0.15, 0, ANSWER, is_first=True)
    assert timings.patience_seconds == pytest.approx(0.6)
    timings.verified(0.1, 4, ANSWER, is_first=False)
    assert timings.patience_seconds == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 8), st.booleans()), max_size=20))
def test_a_draft_that_hangs_costs_less_than_a_second(times: list[tuple[float, int, bool]]) -> None:
    timings = RequestRounds()
    for seconds, proposed, is_first in times:
        timings.verified(seconds, proposed, ANSWER, is_first=is_first)
        timings.proposing.add(seconds)
    assert 0.25 <= timings.patience_seconds < 1.0


def test_a_round_is_reported_once_and_a_prefill_is_not() -> None:
    timings = RequestRounds()
    assert timings.end_round(1.0) is None
    timings.drafted(0.03, StepCost(0.02, 3, 12))
    timings.verified(0.1, 4, Verification(0, (), StepCost(0.08, 2, 9)), is_first=False)
    assert timings.end_round(0.2) == RoundCost(4, 0.2, 0.08, 2, 9, 0.02, 3)
    assert timings.end_round(0.2) is None
    timings.verified(0.1, 0, ANSWER, is_first=True)
    assert timings.end_round(0.2) is None


def test_without_reported_costs_the_measured_times_count() -> None:
    timings = RequestRounds()
    timings.load = 5
    timings.drafted(0.03, None)
    timings.verified(0.1, 4, ANSWER, is_first=False)
    assert timings.end_round(0.2) == RoundCost(4, 0.2, 0.1, 5, 25, 0.03, 5)


def test_a_round_that_waited_in_vain_is_marked() -> None:
    timings = RequestRounds()
    timings.round.was_late = True
    timings.verified(0.1, 0, ANSWER, is_first=False)
    cost = timings.end_round(0.5)
    assert cost is not None
    assert cost.was_late
    timings.verified(0.1, 0, ANSWER, is_first=False)
    cost = timings.end_round(0.5)
    assert cost is not None
    assert not cost.was_late


TOKENIZER = read_tokenizer({"tokenizer.json": (DEMO_TARGET / "tokenizer.json").read_bytes()})


class Pair:
    """A draft and a target that answer at once; the draft is lost after the first round."""

    def __init__(self) -> None:
        self.rounds = RequestRounds()

    async def propose(self, completion: Completion) -> Proposal:
        if completion.has_begun:
            self.rounds.draft_address = None
            return Proposal(completion.length)
        self.rounds.draft_address, self.rounds.round.is_drafted = "d:1", True
        self.rounds.drafted(0.01, None)
        return Proposal(completion.length, (11, 12, 13))

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        self.rounds.proposed()
        self.rounds.target_address = "t:1"
        self.rounds.verified(0.1, len(proposal), ANSWER, is_first=False)
        return Verification(completion.length, ())

    def accept(self, proposal: Proposal, verification: Verification) -> Acceptance:
        return Acceptance(min(2, len(proposal)), 7, NextToken.RECOVERED)


async def rounds_of(max_tokens: int) -> list[RoundResult]:
    pair = Pair()
    completion = Completion((1,), Limits(64, max_tokens), Detokenizer(TOKENIZER), StopStrings(()), "a", 0)
    chunks = generate(completion, pair, pair, pair.rounds.timed(pair.accept))
    return [result async for _, result in pair.rounds.results(chunks)]


async def test_each_round_has_one_result() -> None:
    first, second = await rounds_of(4)
    assert (first.proposed, first.accepted, first.committed) == (3, 2, 3)
    assert first.is_drafted
    assert (first.draft_address, first.target_address) == ("d:1", "t:1")
    assert first.cost is not None
    assert (first.cost.proposed, first.cost.verify_seconds, first.cost.draft_seconds) == (3, 0.1, 0.01)
    assert (second.proposed, second.accepted, second.committed) == (0, 0, 1)
    assert not second.is_drafted
    assert second.draft_address == "d:1", "the last draft that the request had"


async def test_rounds_leave_no_gap() -> None:
    first, second = (result.times for result in await rounds_of(4))
    assert first.began <= first.requested <= first.proposed <= first.verified <= first.decided
    assert second.began == first.decided
    assert sum(second.phases.values()) == pytest.approx(second.seconds)


async def test_a_hit_saves_the_usual_time_of_a_proposal() -> None:
    pair = Pair()
    pair.rounds.drafted(0.02, None)
    chunk = Chunk("", (7,), (False,), (0,))
    pair.rounds.drafted_ahead(Proposal(1, (11,), outcome_rank=3))
    hit = pair.rounds.result(chunk)
    assert (hit.awaited_outcome, hit.outcome_rank, hit.saved_seconds) == (True, 3, 0.02)
    pair.rounds.drafted_ahead(None)
    miss = pair.rounds.result(chunk)
    assert (miss.awaited_outcome, miss.outcome_rank, miss.saved_seconds) == (True, None, 0.0)


GREEDY = SamplingParams(temperature=0.0)


@dataclass
class ScriptedTarget:
    """Continues a fixed text."""

    says: list[int]

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        rows = range(completion.length, completion.length + len(proposal) + 1)
        return Verification(completion.length, tuple(TokenRow(self.says[i]) for i in rows))


@dataclass
class ScriptedDrafter:
    """Proposes the script's tokens round by round, then nothing."""

    script: list[list[int]]

    async def propose(self, completion: Completion) -> Proposal:
        tokens = self.script.pop(0) if self.script else []
        return Proposal(completion.length, tuple(tokens[: completion.room - 1]))


def accept(proposal: Proposal, verification: Verification) -> Acceptance:
    return greedy([Round(proposal, verification, GREEDY)], KEYED)[0]


token_ids = st.integers(1, 3)


@given(
    st.lists(token_ids, min_size=30, max_size=30),
    st.lists(st.lists(token_ids, max_size=6), max_size=12),
    st.integers(1, 20),
)
async def test_the_output_is_the_targets_whatever_is_proposed(
    says: list[int], script: list[list[int]], max_tokens: int
) -> None:
    limits, detokenizer = Limits(1000, max_tokens), Detokenizer(TOKENIZER)
    completion = Completion((says[0],), limits, detokenizer, StopStrings(()), "r", 0)
    drafter, target = ScriptedDrafter(script), ScriptedTarget(says)
    chunks = [chunk async for chunk in generate(completion, drafter, target, accept)]
    assert completion.token_ids == says[: 1 + max_tokens]
    assert [token for chunk in chunks for token in chunk.token_ids] == says[1 : 1 + max_tokens]

"""Each round has one result: the proposed, accepted and committed tokens, and the replicas."""

from __future__ import annotations

import pytest

from coordinator.decoding.completion import Completion, Limits
from coordinator.decoding.detokenization import Detokenizer, StopStrings
from coordinator.decoding.loop import generate
from coordinator.decoding.rounds import RoundRecorder
from coordinator.decoding.tokenization import read_tokenizer
from coordinator.speculation.round_timings import RoundTimings
from coordinator.stats.rounds import RoundResult
from tandem.types import Acceptance, Chunk, NextToken, Proposal, Verification
from tests.paths import DEMO_TARGET

TOKENIZER = read_tokenizer({"tokenizer.json": (DEMO_TARGET / "tokenizer.json").read_bytes()})


class Pair:
    """A draft and a target that answer at once; the draft is lost after the first round."""

    def __init__(self) -> None:
        self.timings = RoundTimings(None)
        self.draft_address: str | None = None
        self.target_address: str | None = None

    completion_tokens = 0

    async def propose(self, completion: Completion) -> Proposal:
        if completion.has_begun:
            self.draft_address = None
            return Proposal(completion.length)
        self.draft_address, self.timings.is_drafted = "d:1", True
        self.timings.drafted(0.01, None)
        return Proposal(completion.length, (11, 12, 13))

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        self.target_address = "t:1"
        self.timings.verified(0.1, len(proposal), is_first=False)
        return Verification(completion.length, ())

    def accept(self, proposal: Proposal, verification: Verification) -> Acceptance:
        return Acceptance(min(2, len(proposal)), 7, NextToken.RECOVERED)


async def rounds_of(max_tokens: int) -> list[RoundResult]:
    pair = Pair()
    completion = Completion(
        (1,), Limits(64, max_tokens), Detokenizer(TOKENIZER), StopStrings(()), request_id="a", seed=0
    )
    recorder = RoundRecorder(pair, pair, pair.accept, pair.timings, pair)
    return [
        recorder.result(chunk) async for chunk in generate(completion, recorder, recorder, recorder.accept)
    ]


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


async def test_tokens_past_the_end_do_not_count() -> None:
    (only,) = await rounds_of(1)
    assert (only.proposed, only.accepted, only.committed) == (3, 1, 1)


async def test_rounds_leave_no_gap() -> None:
    first, second = (result.times for result in await rounds_of(4))
    assert first.began <= first.requested <= first.proposed <= first.verified <= first.decided
    assert second.began == first.decided
    phases = second.wait + second.draft + second.verify + second.sampling
    assert phases == pytest.approx(second.seconds)


async def test_a_hit_saves_the_usual_time_of_a_proposal() -> None:
    pair = Pair()
    pair.timings.drafted(0.02, None)
    recorder = RoundRecorder(pair, pair, pair.accept, pair.timings, pair)
    chunk = Chunk("", (7,), (False,), (0,))
    pair.timings.drafted_ahead(Proposal(1, (11,), outcome_rank=3))
    hit = recorder.result(chunk)
    assert (hit.awaited_outcome, hit.outcome_rank, hit.saved_seconds) == (True, 3, 0.02)
    pair.timings.drafted_ahead(None)
    miss = recorder.result(chunk)
    assert (miss.awaited_outcome, miss.outcome_rank, miss.saved_seconds) == (True, None, 0.0)

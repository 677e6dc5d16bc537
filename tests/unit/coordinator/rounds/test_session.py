"""A session emits the target's text whatever its two sides do, and asks of each what the round needs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.acceptance.rounds import KEYED, Round
from tandem.acceptance.rules import greedy
from tandem.model.types import (
    NO_LEAD,
    Acceptance,
    DraftedOutcomes,
    Lead,
    OwnHead,
    Proposal,
    SamplingParams,
    StepCost,
    TokenRow,
    Verification,
)
from tandem_coordinator import speculation_report as report
from tandem_coordinator.decoding.completion import Completion, Detokenizer, Limits, StopStrings
from tandem_coordinator.decoding.tokenization import read_tokenizer
from tandem_coordinator.outcomes import AWAY, IDLE, Away, Coming, Hit, Miss, Outcome
from tandem_coordinator.rounds.draft_side import NoDraft, Patience
from tandem_coordinator.rounds.events import RequestEvents
from tandem_coordinator.rounds.question import Asked, Late, Question
from tandem_coordinator.rounds.session import RoundSession, SessionPolicy, TargetAlone
from tandem_coordinator.stats.rounds import RoundCost, RoundEnded, RoundPlan, RoundTimes
from tandem_coordinator.telemetry.observer import RequestObserver
from tests.paths import DEMO_TARGET
from tests.unit.coordinator.ended_rounds import round_ended

TOKENIZER = read_tokenizer({"tokenizer.json": (DEMO_TARGET / "tokenizer.json").read_bytes()})
GREEDY = SamplingParams(temperature=0.0)
SAYS = [1, 2, 3] * 20
"""The text that the target says."""
VERIFIED = StepCost(0.01, 2, 9)
HEAD_COST = StepCost(0.002, 2, 4)
PLAN = RoundPlan(4, 2, 3, 1.5)
ASKED = SessionPolicy()


def accept(completion: Completion, proposal: Proposal, verification: Verification) -> Acceptance:
    return greedy([Round(proposal, verification, GREEDY)], KEYED)[0]


@dataclass
class ScriptedTarget:
    """Continues a fixed text; by itself too, as far as it may, with the proposals of a script."""

    says: Sequence[int] = tuple(SAYS)
    goes_on_with: deque[tuple[int, ...] | None] = field(default_factory=deque)
    """Proposals of the rounds that it begins by itself; None: it begins none."""
    address: str | None = "t:1"
    has_read: bool = False
    cost: StepCost | None = field(default_factory=lambda: VERIFIED)
    asked: list[tuple[Proposal | OwnHead, Lead]] = field(default_factory=list)
    has_head: bool = False
    head_says: tuple[int, ...] = ()
    """What its own head proposes, of which it takes as much as it is asked for."""
    _begun: Proposal | OwnHead | None = None

    async def verify(self, completion: Completion, asked: Proposal | OwnHead, lead: Lead) -> Verification:
        self.asked.append((asked, lead))
        is_led = self._begun is not None
        if isinstance(asked, Proposal):
            proposal = asked
        else:
            proposal = Proposal(completion.length, self.head_says[: asked.max_tokens], cost=HEAD_COST)
        rows = range(completion.length, completion.length + len(proposal) + 1)
        verification = Verification(
            completion.length,
            tuple(TokenRow(self.says[i]) for i in rows),
            self.cost,
            proposal if is_led or proposal is not asked else None,
            led=int(is_led),
        )
        kept = accept(completion, proposal, verification).accepted_count + 1
        self._begun = None
        if lead.credits and self.goes_on_with and (tokens := self.goes_on_with.popleft()) is not None:
            room = max(completion.room - kept - 1, 0)
            self._begun = Proposal(completion.length + kept, tokens[:room])
            if isinstance(asked, OwnHead):
                self._begun = asked
        return verification

    def find_led(self, completion: Completion) -> Proposal | OwnHead | None:
        return self._begun

    def pass_on(self, outcomes: DraftedOutcomes) -> None: ...


@dataclass
class ScriptedDraft:
    """Has ready what a script says, and answers questions with what it would propose."""

    has_ready: deque[Outcome | Away] = field(default_factory=deque)
    proposes: tuple[int, ...] = ()
    is_late: bool = False
    is_ahead: bool = False
    address: str | None = "d:1"
    usual_seconds: float = 0.02
    did: list[str] = field(default_factory=list)
    """Calls, with the tokens that were asked for."""

    def limit(self, completion: Completion, tokens: int) -> int:
        return tokens

    def rest(self, completion: Completion, plan: RoundPlan) -> None:
        self.did.append("rest")

    def outcome(self, completion: Completion) -> Outcome | Away:
        found = self.has_ready.popleft() if self.has_ready else IDLE
        if isinstance(found, Hit | Coming):
            room = max(completion.room - 1, 0)
            found = replace(found, proposal=Proposal(completion.length, found.proposal.token_ids[:room]))
        return found

    async def wait_for(self, completion: Completion, coming: Coming, tokens: int) -> Proposal | None:
        self.did.append(f"wait for {tokens}")
        return coming.proposal

    async def ask(self, completion: Completion, tokens: int, plan: RoundPlan) -> Asked | Late | None:
        self.did.append(f"ask for {tokens}")
        if self.is_late:
            return Late()
        cost = StepCost(0.004, 3, 12)
        return Asked(Proposal(completion.length, self.proposes[:tokens], cost=cost), 0.005)

    def draft_ahead_of(self, completion: Completion, proposal: Proposal, plan: RoundPlan) -> None:
        self.did.append(f"work ahead of {len(proposal)}")


@dataclass
class Chosen(TargetAlone):
    """Decides as a test says."""

    plan: RoundPlan = PLAN
    after_miss: int = 4
    after_hit: int = 4

    def begin_round(self, load: int, target_address: str | None) -> RoundPlan:
        return self.plan

    def tokens_after_hit(self, coming: Coming, tokens: int) -> int:
        return min(self.after_hit, tokens)

    def tokens_after_miss(self, tokens: int) -> int:
        return min(self.after_miss, tokens)


def count_one(target_address: str | None) -> int:
    return 1


def session_of(
    draft: ScriptedDraft | NoDraft,
    target: ScriptedTarget,
    controller: TargetAlone,
    *,
    max_tokens: int = 30,
    policy: SessionPolicy = ASKED,
    ended: list[RoundEnded] | None = None,
) -> RoundSession:
    completion = Completion(
        (SAYS[0],), Limits(1000, max_tokens), Detokenizer(TOKENIZER), StopStrings(()), "r", 0
    )
    listeners = () if ended is None else (ended.append,)
    events = RequestEvents("r", RequestObserver(), listeners)
    return RoundSession(completion, draft, target, controller, accept, events, policy, count_one)


async def question_of(session: RoundSession, controller: TargetAlone) -> Question:
    return await session.question(controller.begin_round(1, None))


HIT = Hit(Proposal(1, (2, 3, 1, 2, 3)), 1, StepCost(0.003, 2, 2))
COMING = Coming(Proposal(1, (2, 3)), 0, 4, 0.01, 0.01)
MISSED = Miss(StepCost(0.003, 2, 2))


@pytest.mark.parametrize(
    ("ready", "did", "proposed"),
    [
        pytest.param(HIT, ["work ahead of 4"], 4, id="hit: no more than planned, and nobody is asked"),
        pytest.param(COMING, ["wait for 4", "work ahead of 2"], 2, id="coming: what is there in time"),
        pytest.param(MISSED, ["ask for 4", "work ahead of 3"], 3, id="miss"),
        pytest.param(IDLE, ["ask for 4", "work ahead of 3"], 3, id="idle"),
        pytest.param(AWAY, ["work ahead of 0"], 0, id="away: the target goes on alone"),
    ],
)
async def test_a_round_proposes_what_the_draft_has(
    ready: Outcome | Away, did: list[str], proposed: int
) -> None:
    draft = ScriptedDraft(deque([ready]), (2, 3, 1))
    controller = Chosen()
    question = await question_of(session_of(draft, ScriptedTarget(), controller), controller)
    assert draft.did == did
    assert len(question.given) == proposed
    assert question.awaited_outcome == (ready not in (IDLE, AWAY))
    assert question.outcome_rank == (ready.rank if isinstance(ready, Hit | Coming) else None)


@pytest.mark.parametrize(
    ("ready", "did"),
    [
        (HIT, ["work ahead of 4"]),
        (replace(HIT, proposal=Proposal(1, (2, 3))), ["ask for 4", "work ahead of 4"]),
        (COMING, ["wait for 4", "ask for 4", "work ahead of 4"]),
        (replace(COMING, max_tokens=3), ["wait for 2", "ask for 4", "work ahead of 4"]),
        (MISSED, ["ask for 4", "work ahead of 4"]),
    ],
)
async def test_a_text_that_depends_on_proposals_gets_whole_ones(ready: Outcome, did: list[str]) -> None:
    """However far the draft got, and whatever the controller finds worth its time: lengths are no matter of time."""
    draft = ScriptedDraft(deque([ready]), (2, 3, 1, 2, 3))
    controller = Chosen(after_miss=0, after_hit=1)
    session = session_of(draft, ScriptedTarget(), controller, policy=SessionPolicy(keeps_proposals=True))
    question = await question_of(session, controller)
    assert draft.did == did
    assert len(question.given) == 4


async def test_after_a_miss_the_target_goes_alone_once_where_that_is_faster() -> None:
    draft = ScriptedDraft(deque([MISSED, MISSED, HIT, MISSED]), (2, 3, 1), is_ahead=True)
    controller = Chosen(after_miss=0)
    session = session_of(draft, ScriptedTarget(), controller)
    proposed = [len((await question_of(session, controller)).given) for _ in range(4)]
    assert proposed == [0, 3, 4, 0], "never twice"


async def test_a_draft_that_is_late_costs_the_round_its_proposal() -> None:
    ended: list[RoundEnded] = []
    session = session_of(ScriptedDraft(is_late=True), ScriptedTarget(), Chosen(), max_tokens=1, ended=ended)
    session.completion.room = 3
    await anext(session.rounds())
    assert (ended[0].proposed, ended[0].was_late, ended[0].is_drafted) == (0, True, False)
    assert ended[0].cost is not None
    assert ended[0].cost.was_late


# ---- leading


@pytest.mark.parametrize(
    ("policy", "tokens", "is_ahead", "after_miss", "lead"),
    [
        (SessionPolicy(0), 0, False, 4, NO_LEAD),
        (SessionPolicy(3), 0, False, 4, Lead(3)),
        (SessionPolicy(3), 4, True, 4, NO_LEAD),
        (SessionPolicy(3, leads_with_proposals=True), 4, False, 4, NO_LEAD),
        (SessionPolicy(3, leads_with_proposals=True), 4, True, 4, Lead(3, 4)),
        (SessionPolicy(3, leads_with_proposals=True), 4, True, 0, Lead(3, 4, alone_after_miss=True)),
    ],
)
async def test_the_lead_is_the_policys(
    policy: SessionPolicy, tokens: int, is_ahead: bool, after_miss: int, lead: Lead
) -> None:
    controller = Chosen(RoundPlan(tokens, 2), after_miss=after_miss)
    draft = ScriptedDraft(proposes=(2, 3, 1, 2), is_ahead=is_ahead)
    session = session_of(draft, ScriptedTarget(), controller, policy=policy)
    assert (await question_of(session, controller)).lead == lead


@pytest.mark.parametrize("tokens", [0, 4])
async def test_what_the_target_has_begun_is_the_question(tokens: int) -> None:
    """Nobody is asked, whatever was planned; the draft works ahead of it."""
    policy = SessionPolicy(2, leads_with_proposals=True)
    target = ScriptedTarget(goes_on_with=deque([(3, 1), None]))
    draft = ScriptedDraft(deque([IDLE, HIT]), (2,), is_ahead=True)
    ended: list[RoundEnded] = []
    controller = Chosen(RoundPlan(4, 2))
    session = session_of(draft, target, controller, policy=policy, ended=ended)
    rounds = session.rounds()
    await anext(rounds)
    draft.did.clear()
    controller.plan = RoundPlan(tokens, 2)
    await anext(rounds)
    asked, _ = target.asked[1]
    assert isinstance(asked, Proposal)
    assert asked.token_ids == (3, 1)
    assert draft.did == (["work ahead of 2"] if tokens else ["rest", "work ahead of 2"])
    assert ended[1].outcome_rank == (1 if tokens else None)
    if tokens:
        assert ended[1].cost is not None
        assert ended[1].cost.was_led


async def test_tokens_that_came_after_the_target_had_gone_on_alone_are_a_miss() -> None:
    policy = SessionPolicy(2, leads_with_proposals=True)
    target = ScriptedTarget(goes_on_with=deque([(), None]))
    draft = ScriptedDraft(deque([IDLE, HIT]), (2,), is_ahead=True)
    ended: list[RoundEnded] = []
    rounds = session_of(draft, target, Chosen(), policy=policy, ended=ended).rounds()
    await anext(rounds)
    await anext(rounds)
    assert (ended[1].proposed, ended[1].awaited_outcome, ended[1].outcome_rank) == (0, True, None)
    assert ended[1].outcome_step == HIT.step


# ---- the text


token_ids = st.integers(1, 3)
tokens = st.lists(token_ids, max_size=6).map(tuple)
outcomes = st.one_of(
    st.just(IDLE),
    st.just(AWAY),
    st.just(MISSED),
    tokens.map(lambda each: Hit(Proposal(0, each), 0)),
    tokens.map(lambda each: Coming(Proposal(0, each), 0, 6, 0.0, 0.0)),
)


@given(
    st.lists(token_ids, min_size=40, max_size=40),
    st.lists(outcomes, max_size=12).map(deque),
    st.lists(st.none() | tokens, max_size=12).map(deque),
    tokens,
    st.integers(1, 20),
    st.booleans(),
)
async def test_the_output_is_the_targets_whatever_is_proposed(
    says: list[int],
    has_ready: deque[Outcome | Away],
    goes_on_with: deque[tuple[int, ...] | None],
    proposes: tuple[int, ...],
    max_tokens: int,
    keeps: bool,
) -> None:
    target = ScriptedTarget(says, goes_on_with)
    draft = ScriptedDraft(has_ready, proposes, is_ahead=True)
    policy = SessionPolicy(2, leads_with_proposals=True, keeps_proposals=keeps)
    session = session_of(draft, target, Chosen(RoundPlan(6, 2)), max_tokens=max_tokens, policy=policy)
    session.completion.token_ids[0] = says[0]
    chunks = [chunk async for chunk in session.rounds()]
    assert session.completion.token_ids == says[: 1 + max_tokens]
    assert [token for chunk in chunks for token in chunk.token_ids] == says[1 : 1 + max_tokens]


async def test_a_target_alone_needs_no_draft() -> None:
    ended: list[RoundEnded] = []
    session = session_of(
        NoDraft(report.off("none")), ScriptedTarget(), TargetAlone(), max_tokens=3, ended=ended,
        policy=SessionPolicy(2),
    )  # fmt: skip
    assert [chunk.token_ids async for chunk in session.rounds()] == [(2,), (3,), (1,)]
    assert [each.proposed for each in ended] == [0, 0, 0]
    assert {each.draft_address for each in ended} == {None}


class OneWay:
    """A grammar that lets only the target's own text follow, for so many tokens."""

    is_over = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def forced(self, count: int) -> list[int]:
        return self._tokens[:count]

    def follow(self, token_ids: Sequence[int]) -> bool:
        self._tokens = []
        return True

    def allowed_count(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)


async def test_what_a_grammar_forces_is_counted_apart_and_nobody_is_asked() -> None:
    ended: list[RoundEnded] = []
    draft = ScriptedDraft(proposes=(2, 3))
    session = session_of(draft, ScriptedTarget(), Chosen(RoundPlan(2)), max_tokens=20, ended=ended)
    session.completion.grammar = cast("Any", OneWay((2, 3, 1)))
    session.completion.max_forced = 16
    rounds = session.rounds()
    chunk = await anext(rounds)
    assert (chunk.token_ids, chunk.proposed, chunk.drafted) == ((2, 3, 1, 2), 0, (False,) * 4)
    assert (ended[0].proposed, ended[0].accepted, ended[0].forced, ended[0].cost) == (0, 0, 3, None)
    assert draft.did == ["work ahead of 3"]
    await anext(rounds)
    assert (ended[1].proposed, ended[1].forced) == (2, 0)


# ---- what its listeners learn


async def rounds_of(
    draft: ScriptedDraft, max_tokens: int, target: ScriptedTarget | None = None
) -> list[RoundEnded]:
    ended: list[RoundEnded] = []
    session = session_of(draft, target or ScriptedTarget(), Chosen(), max_tokens=max_tokens, ended=ended)
    async for _ in session.rounds():
        pass
    return ended


async def test_each_round_is_one_event() -> None:
    draft = ScriptedDraft(deque([IDLE, AWAY]), (2, 3, 3))
    first, second = await rounds_of(draft, 4)
    assert (first.proposed, first.accepted, first.committed) == (3, 2, 3)
    assert (first.is_drafted, first.draft_address, first.target_address) == (True, "d:1", "t:1")
    assert first.plan == PLAN
    assert first.asked_seconds == 0.005
    assert first.cost == RoundCost(3, first.times.seconds, 0.01, 2, 9, 0.004, 3)
    assert (second.proposed, second.accepted, second.committed) == (0, 0, 1)
    assert not second.is_drafted
    assert second.cost is not None


async def test_a_round_in_which_the_target_reads_says_nothing_of_the_next() -> None:
    (ended,) = await rounds_of(ScriptedDraft(proposes=(2, 3)), 2, ScriptedTarget(has_read=True))
    assert ended.has_read
    assert ended.cost is None


async def test_rounds_leave_no_gap() -> None:
    first, second = (
        ended.times for ended in await rounds_of(ScriptedDraft(deque([IDLE, AWAY]), (2, 3, 3)), 4)
    )
    assert first.began <= first.requested <= first.proposed <= first.verified <= first.decided
    assert second.began == first.decided
    assert sum(second.phases.values()) == pytest.approx(second.seconds)


async def test_a_hit_saves_the_usual_time_of_a_proposal() -> None:
    hit, miss = await rounds_of(ScriptedDraft(deque([HIT, MISSED]), (1, 2)), 8)
    assert (hit.awaited_outcome, hit.outcome_rank, hit.saved_seconds) == (True, 1, 0.02)
    assert (miss.awaited_outcome, miss.outcome_rank, miss.saved_seconds) == (True, None, 0.0)
    assert hit.cost is not None
    assert hit.cost.was_ahead


async def test_without_reported_costs_the_measured_times_count() -> None:
    (ended,) = await rounds_of(ScriptedDraft(deque([HIT])), 5, ScriptedTarget(cost=None))
    times = ended.times
    assert ended.cost == RoundCost(4, times.seconds, times.verified - times.proposed, 3, 15, was_ahead=True)


async def test_a_listener_that_fails_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[RoundEnded] = []

    def fail(_: RoundEnded) -> None:
        raise ValueError("it is broken")

    session = session_of(ScriptedDraft(), ScriptedTarget(), Chosen(), max_tokens=2)
    session.events.subscribe(fail)
    session.events.subscribe(ended.append)
    with caplog.at_level(logging.ERROR):
        assert [chunk.token_ids async for chunk in session.rounds()] == [(2,), (3,)]
    assert len(ended) == 2
    assert [record.message for record in caplog.records] == ["a listener failed"] * 2


# ---- patience


def verified(
    seconds: float, proposed: int = 0, *, reads: bool = False, asked: float | None = None
) -> RoundEnded:
    times = RoundTimes(0.0, 0.0, 0.0, seconds, seconds)
    return round_ended(proposed, 0)._replace(times=times, has_read=reads, asked_seconds=asked)


def test_the_wait_ends_a_few_verifications_after_the_usual_time() -> None:
    patience = Patience()
    patience.round_ended(verified(9.0, reads=True))
    patience.round_ended(verified(0.1, 4, asked=0.2))
    assert patience.seconds == pytest.approx(0.6)


def test_the_first_answer_counts_only_while_there_is_no_other() -> None:
    patience = Patience()
    patience.round_ended(verified(0.15, reads=True))
    assert patience.seconds == pytest.approx(0.6)
    patience.round_ended(verified(0.1, 4))
    assert patience.seconds == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 8), st.booleans()), max_size=20))
def test_a_draft_that_hangs_costs_less_than_a_second(times: list[tuple[float, int, bool]]) -> None:
    patience = Patience()
    for seconds, proposed, reads in times:
        patience.round_ended(verified(seconds, proposed, reads=reads, asked=seconds))
    assert 0.25 <= patience.seconds < 1.0


HEADED = SessionPolicy(2, asks_head=True)


async def test_a_target_with_a_head_is_asked_to_propose_and_goes_on_by_itself() -> None:
    """One question a round, none of them to a draft; each event says what was proposed and what the head took."""
    ended: list[RoundEnded] = []
    target = ScriptedTarget(has_head=True, head_says=(2, 3, 9), goes_on_with=deque([()] * 20))
    session = session_of(NoDraft(None), target, Chosen(), max_tokens=10, policy=HEADED, ended=ended)
    chunks = [chunk async for chunk in session.rounds()]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == SAYS[1:11]
    assert all(isinstance(asked, OwnHead) for asked, _ in target.asked)
    assert [asked.max_tokens for asked, _ in target.asked if isinstance(asked, OwnHead)][:2] == [4, 4]
    assert {lead for _, lead in target.asked} == {Lead(2)}
    first, second = ended[:2]
    assert (first.proposed, first.accepted, first.committed) == (3, 2, 3)
    assert first.cost is not None
    assert (first.cost.draft_seconds, first.cost.was_led) == (0.002, False)
    assert second.cost is not None
    assert second.cost.was_led


async def test_a_plan_of_no_tokens_lets_the_head_rest() -> None:
    target = ScriptedTarget(has_head=True, head_says=(2, 3))
    controller = Chosen(RoundPlan(0))
    question = await question_of(session_of(NoDraft(None), target, controller, policy=HEADED), controller)
    assert question.asked == OwnHead(0)
    assert question.lead == Lead(2)


async def test_a_head_is_asked_for_no_more_than_there_is_room_for() -> None:
    target = ScriptedTarget(has_head=True)
    controller = Chosen()
    session = session_of(NoDraft(None), target, controller, max_tokens=3, policy=HEADED)
    assert (await question_of(session, controller)).asked == OwnHead(2)


async def test_a_target_without_a_head_serves_such_a_request_alone() -> None:
    """As one does to which a sequence has moved from another with a head."""
    target = ScriptedTarget(has_head=False)
    controller = Chosen()
    question = await question_of(session_of(NoDraft(None), target, controller, policy=HEADED), controller)
    assert question.given.token_ids == ()

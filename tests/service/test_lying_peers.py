"""A draft or a target that lies to the coordinator: what it says in place of its answers costs time, and no text.

The peers are real services behind a proxy, which passes their answers on and puts lies in the place of some.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from tandem.clients.client import Client, Completed
from tandem.engine.models.loading import LoadedModel
from tandem.errors import TandemError
from tandem.model.types import GenerationRequest
from tandem.telemetry.logs import formatter_of
from tandem.v1 import draft_pb2, target_pb2
from tandem_coordinator.replicas import hangs
from tests.malformed import Alteration, alterations, check_sentence, contents, drawn
from tests.service.clients import complete, until
from tests.service.engines import Faults, services
from tests.service.fakes import coordinated
from tests.service.message_proxy import MessageProxy, message_proxy

EXAMPLES = 60
SOAK_EXAMPLES = 2_000
LANES = 8
"""Coordinators that are lied to at once, each with a proxy of its own."""
REQUEST_SECONDS = 30.0
"""Bound on a hang. The longest wait below is a second or two."""
TOKENS = 16
PROMPT = (300, 301, 302, 303, 304)
GREEDY = GenerationRequest(
    PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, seed=1, num_speculative_tokens=3
)
STRICT = replace(GREEDY, temperature=1.0, seed=2, rejection_sampling_strategy="strict")
EXACT = (GREEDY, STRICT)
"""Requests whose text is the target's alone."""
OTHERS = (
    replace(GREEDY, temperature=1.0, seed=3, rejection_sampling_strategy="residual"),
    replace(GREEDY, seed=4, logprobs=2),
)
"""Requests whose text depends on distributions, or on logits: a lie about those is believed if they may be true."""
REQUESTS = EXACT + OTHERS


# ---- lies


class Act(Enum):
    """A treatment of an answer."""

    PASS = "pass it on"
    DROP = "say nothing"
    DOUBLE = "say it twice"
    SWAP = "say it after the next one"
    REPLACE = "say something else"
    PRECEDE = "say something else first"
    ALTER = "change one value of it"


SAYING = (Act.REPLACE, Act.PRECEDE)


@dataclass(frozen=True)
class Lie:
    """A peer's treatment of one of its answers."""

    act: Act
    content: bytes = b""
    """A message to say instead."""
    has_true_labels: bool = False
    """True if that is said of the sequence, the step and the length of the true answer."""
    alteration: Alteration | None = None


HONEST = Lie(Act.PASS)


def plans(recorded: Sequence[Message]) -> st.SearchStrategy[list[Lie]]:
    """Treatments of the answers of a stream, one after the other: some that are passed on, and lies behind them."""
    content = st.sampled_from(recorded).flatmap(contents)
    plain = st.sampled_from([Lie(act) for act in Act if act not in (*SAYING, Act.ALTER)])
    other = st.builds(Lie, st.sampled_from(SAYING), content, st.booleans())
    altered = st.builds(Lie, st.just(Act.ALTER), alteration=alterations())
    lie = st.one_of(altered, altered, other, plain)
    lies = st.lists(lie, min_size=2, max_size=5)
    return st.builds(lambda count, told: [HONEST] * count + told, st.integers(0, 8), lies)


@dataclass
class Liar:
    """Carries out a plan with the answers of one method."""

    method: str
    request: type[Any]
    answer: type[Any]
    proxy: MessageProxy
    vocabulary_size: int
    truths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The tokens of the sequences of each seed, prompt included."""
    plan: deque[Lie] = field(default_factory=deque)
    told: list[Lie] = field(default_factory=list)
    """Those of all plans that were told."""
    opened: int = 0
    """Sequences that were opened since the plan began."""
    recorded: list[Message] | None = None
    """True answers, while they are kept."""
    _kept: list[bytes] = field(default_factory=list)
    _seeds: dict[tuple[object, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proxy.edit_request = self._listen
        self.proxy.replace_answer = self._say

    @property
    def address(self) -> str:
        return self.proxy.address

    def begin(self, plan: Sequence[Lie]) -> None:
        self.plan = deque(plan)
        self.opened = 0

    def _listen(self, name: str, content: bytes, stream: object) -> bytes:
        if name == self.method:
            for part in self.request.FromString(content).parts:
                if part.HasField("open"):
                    self.opened += 1
                    self._seeds[stream, part.sequence] = part.open.sampling.seed
        return content

    def _say(self, name: str, content: bytes, stream: object) -> Sequence[bytes]:
        if name != self.method:
            return [content]
        if self.recorded is not None:
            self.recorded.append(self.answer.FromString(content))
        lie = self.plan.popleft() if self.plan else HONEST
        kept = self._kept
        self._kept = []
        if lie.act is not Act.PASS:
            self.told.append(lie)
        match lie.act:
            case Act.DROP:
                said = []
            case Act.DOUBLE:
                said = [content, content]
            case Act.SWAP:
                said = []
                self._kept = [content]
            case Act.REPLACE | Act.ALTER:
                said = [self._lie(lie, content, stream)]
            case Act.PRECEDE:
                said = [self._lie(lie, content, stream), content]
            case _:
                said = [content]
        return [*said, *kept]

    def _lie(self, lie: Lie, content: bytes, stream: object) -> bytes:
        try:
            message = self.answer.FromString(content if lie.act is Act.ALTER else lie.content)
        except DecodeError:
            return lie.content
        if lie.alteration is not None:
            lie.alteration.apply(message)
        if lie.has_true_labels:
            for own, true in zip(message.parts, self.answer.FromString(content).parts, strict=False):
                copy_labels(true, own)
        for part in message.parts:
            if part.WhichOneof("content") == "verification":
                seed = self._seeds.get((stream, part.sequence), 0)
                self._correct(part.verification, self.truths.get(seed, ()))
        said: bytes = message.SerializeToString()
        return said

    def _correct(self, answer: Any, truth: tuple[int, ...]) -> None:
        """Name the true tokens where others could be true as well: nobody but the target knows."""
        for index, token_id in enumerate(answer.token_rows.token_ids):
            position = answer.base_length + index
            if 0 <= position < len(truth) and 0 <= token_id < self.vocabulary_size:
                answer.token_rows.token_ids[index] = truth[position]


def copy_labels(true: Any, own: Any) -> None:
    """Say another answer of the sequence, step and length of the true one."""
    own.sequence = true.sequence
    true_kind = true.WhichOneof("content")
    own_kind = own.WhichOneof("content")
    if None in (true_kind, own_kind):
        return
    from_answer = getattr(true, true_kind)
    to_answer = getattr(own, own_kind)
    for name in ("serial", "led", "base_length"):
        if name in from_answer.DESCRIPTOR.fields_by_name and name in to_answer.DESCRIPTOR.fields_by_name:
            setattr(to_answer, name, getattr(from_answer, name))


# ---- peers


METHODS: dict[str, tuple[str, type[Any], type[Any]]] = {
    "target": ("Verify", target_pb2.VerifyRequest, target_pb2.VerifyResponse),
    "draft": ("Propose", draft_pb2.ProposeRequest, draft_pb2.ProposeResponse),
}
OPTIONS: dict[str, Any] = {
    "draft_ahead": 4,
    "target_lead": 2,
    "draft_patience_seconds": None,
    "target_wait_seconds": 1.0,
}


@dataclass
class Lane:
    """A coordinator, and the peer that lies to it."""

    client: Client
    pool: Any
    """The liar is a member of it."""
    targets: Any
    """The pool of targets."""
    liar: Liar
    honest: str
    """Address of a target that does not lie."""

    @property
    def lies_as_target(self) -> bool:
        return self.liar.method == "Verify"

    async def complete_all(
        self, requests: Sequence[GenerationRequest], plan: Sequence[Lie], *, is_alone: bool
    ) -> list[Completed | BaseException]:
        """Complete the requests while the liar carries out its plan: completions, and errors in their place.

        A target that lies has all the sequences when it begins to, and is the only target if it `is_alone`.
        """
        await until(lambda: bool(self.pool.members[self.liar.address].is_ready))
        passes = self.liar.proxy.passes_answers
        if self.lies_as_target:
            self.targets.drain(self.honest)
        self.liar.begin(plan)
        passes.clear()
        async with asyncio.timeout(REQUEST_SECONDS):
            running = [asyncio.create_task(complete(self.client, request)) for request in requests]
            await until(lambda: self.liar.opened >= len(requests))
            if not is_alone:
                self.targets.resume(self.honest)
            passes.set()
            found = await asyncio.gather(*running, return_exceptions=True)
        self.liar.begin([])
        self.targets.resume(self.honest)
        return found


@asynccontextmanager
async def lanes(model: LoadedModel, role: str, count: int) -> AsyncIterator[list[Lane]]:
    """Coordinators over the same services, each with a peer that lies to it."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        peers: Any = services(model, model, Faults(), Faults(), max_sequences=64)
        targets, draft = await enter(peers)
        lying, honest = targets.split(",")
        found = []
        for _ in range(count):
            proxy = await enter(message_proxy(lying if role == "target" else draft))
            addresses = (f"{proxy.address},{honest}", draft)
            if role == "draft":
                addresses = (honest, proxy.address)
            client, service = await enter(coordinated(*addresses, **OPTIONS))
            replicas: Any = service.replicas
            pool = replicas.targets if role == "target" else replicas.drafts
            liar = Liar(*METHODS[role], proxy, model.info.vocabulary_size)
            found.append(Lane(client, pool, replicas.targets, liar, honest))
        yield found


async def record(lane: Lane) -> list[Message]:
    """The true answers to the requests, one after the other; their tokens are the liar's truths from then on."""
    messages = lane.liar.recorded = []
    for request in REQUESTS:
        [done] = await lane.complete_all([request], [], is_alone=True)
        assert isinstance(done, Completed), done
        assert request.seed is not None
        lane.liar.truths[request.seed] = (*PROMPT, *done.token_ids)
    lane.liar.recorded = None
    return messages


# ---- tests


def check_logs(records: Sequence[logging.LogRecord]) -> None:
    """Nothing unforeseen is logged, and each event is one line."""
    formatter = formatter_of("text")
    for record in records:
        line = formatter.format(record)
        assert record.levelno < logging.ERROR, line
        assert "\n" not in line
        assert "Traceback" not in line


async def lie(model: LoadedModel, role: str, examples: int) -> list[Lie]:
    """Tell lies; return those that were told. Fail unless each request ends as it should."""
    async with lanes(model, role, LANES) as found:
        messages = await record(found[0])
        truths = found[0].liar.truths
        waiting = iter(enumerate(drawn(plans(messages), examples)))

        async def lie_in(lane: Lane) -> None:
            lane.liar.truths = truths
            for number, plan in waiting:
                requests = [EXACT[number % 2], OTHERS[number // 2 % 2]]
                is_alone = role == "target" and number % 3 == 0
                endings = await lane.complete_all(requests, plan, is_alone=is_alone)
                for request, ending in zip(requests, endings, strict=True):
                    check_ending(request, ending, truths, plan, may_fail=is_alone)

        async with asyncio.TaskGroup() as tasks:
            for lane in found:
                tasks.create_task(lie_in(lane))
    return [told for lane in found for told in lane.liar.told]


def check_ending(
    request: GenerationRequest,
    ending: Completed | BaseException,
    truths: Mapping[int, tuple[int, ...]],
    plan: Sequence[Lie],
    *,
    may_fail: bool,
) -> None:
    """Fail unless the request was completed, with its own text where that is certain, or ended in one sentence."""
    if isinstance(ending, Completed):
        assert len(ending.token_ids) == TOKENS, plan
        if request in EXACT:
            assert request.seed is not None
            assert (*PROMPT, *ending.token_ids) == truths[request.seed], plan
        return
    assert may_fail, (ending, plan)
    assert isinstance(ending, TandemError), (ending, plan)
    check_sentence(str(ending), plan)


@pytest.fixture
def short_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon for lost answers, so that hundreds of losses take no minutes."""
    monkeypatch.setattr(hangs, "ASK_AGAIN_SECONDS", 0.2)


IN_FULL = pytest.param(SOAK_EXAMPLES, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("examples", [EXAMPLES, IN_FULL])
@pytest.mark.parametrize("role", METHODS)
@pytest.mark.usefixtures("short_silences")
async def test_a_lie_costs_no_text(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, role: str, examples: int
) -> None:
    """Another target goes on where one lies, and no draft changes a text. A request to a target that lies and is alone
    may end, in one sentence."""
    told = await lie(model, role, examples)
    check_logs(caplog.records)
    assert len(told) > examples / 2
    assert {each.act for each in told} == {*Act} - {Act.PASS}
    lost = [record for record in caplog.records if record.getMessage().startswith(f"{role} lost")]
    assert len(lost) > examples / 10


async def complete_with(
    target: str, draft: str, role: str, description: bytes | None
) -> tuple[bytes, Completed | TandemError]:
    """Start a coordinator over peers of which one describes its model like this, or as it is, and complete a request:
    the true description, and the completion or the error in its place."""
    true = b""

    def describe(name: str, content: bytes, _: object) -> Sequence[bytes]:
        nonlocal true
        if name != "GetModelInfo":
            return [content]
        true = content
        return [content if description is None else description]

    async with message_proxy(target if role == "target" else draft) as proxy:
        proxy.replace_answer = describe
        addresses = (proxy.address, draft) if role == "target" else (target, proxy.address)
        try:
            async with asyncio.timeout(REQUEST_SECONDS), coordinated(*addresses, **AT_START) as (client, _):
                return true, await complete(client, GREEDY)
        except TandemError as error:
            return true, error


AT_START: dict[str, Any] = OPTIONS | {
    "speculation_policy": "adaptive",
    "start_timeout_seconds": 1.0,
    "start_without_draft": 0.5,
}


@pytest.mark.parametrize("examples", [EXAMPLES // 3, IN_FULL])
@pytest.mark.parametrize("role", METHODS)
async def test_a_false_description_is_refused_or_served(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, role: str, examples: int
) -> None:
    """A coordinator says in one sentence why it does not start, or it serves. With any draft the text is the same."""
    kind: Any = {
        "target": target_pb2.TargetServiceGetModelInfoResponse,
        "draft": draft_pb2.DraftServiceGetModelInfoResponse,
    }[role]
    async with services(model, model, max_sequences=64) as (target, draft):
        assert draft is not None
        complete_as = partial(complete_with, target, draft, role)
        true, done = await complete_as(None)
        assert isinstance(done, Completed)
        waiting = iter(drawn(contents(kind.FromString(true)), examples))

        async def lie_some() -> int:
            served = 0
            for description in waiting:
                _, ending = await complete_as(description)
                if isinstance(ending, TandemError):
                    check_sentence(str(ending), description)
                else:
                    served += 1
                    assert role == "target" or ending.token_ids == done.token_ids, description
            return served

        served = sum(await asyncio.gather(*[lie_some() for _ in range(LANES)]))
    check_logs(caplog.records)
    assert served > 0
    # Some of a few descriptions may all be served.
    assert served < examples or examples <= EXAMPLES

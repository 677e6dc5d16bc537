"""Nothing that one caller was told reaches another: the attacks by which it was read, each also where callers share.

A caller is known by its token, else by its address; within it a salt keeps requests apart. Each attack has to succeed
where callers share, or it would show nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from tandem.clients.client import Client, Completed
from tandem.engine.core.jobs import StepRecord
from tandem.engine.models.loading import LoadedModel
from tandem.errors import InvalidRequestError
from tandem.model.types import (
    DraftOptions,
    Finish,
    GenerationRequest,
    Grammar,
    GrammarKind,
    RowKind,
    SamplingParams,
    TargetOptions,
    common_length,
)
from tandem.rpc.credentials import Credentials
from tandem.serving.interceptors import RunningCalls
from tandem.serving.scopes import MAX_SCOPE_LENGTH
from tandem.serving.server import new_server
from tandem.v1 import draft_pb2, target_pb2
from tandem.wire import draft as draft_wire
from tandem.wire import target as target_wire
from tandem.wire.status import Ending
from tandem_coordinator.service import CoordinatorService
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.transport.conformance.draft import Conversation, Subject
from tandem_coordinator.transport.draft_client import DraftClient
from tandem_draft.proposers.suffix import suffix_proposer
from tandem_draft.servicer import DraftedFor, DraftServicer
from tests.paths import DEMO_TARGET
from tests.service.clients import complete
from tests.service.engines import Faults, draft, model_free, services, target
from tests.service.fakes import HANG_SECONDS, FakeTarget, coordinated, served, serving, settings_for
from tests.service.http_cluster import http_cluster, post

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
LETTERS = "QZJVKWYH"
"""No token has two of them."""
TOLD, KNOWN = 40, 6
"""Tokens of the answer that is attacked, and how many of them the attacker knows."""
SECRET = GenerationRequest(
    "A letter begins:", max_tokens=TOLD, seed=11, grammar=Grammar(GrammarKind.REGEX, f"[{LETTERS}]{{400}}")
)
TOKENS = ("the-token-of-the-first-caller", "the-token-of-the-second-caller")
K = 8
GREEDY = SamplingParams(temperature=0.0)
LETTER_IDS = TOKENIZER.encode(LETTERS).ids


@dataclass(frozen=True)
class Caller:
    """Sends requests as one caller."""

    client: Client
    salt: str | None = None

    async def complete(self, request: GenerationRequest) -> Completed:
        return await complete(self.client, replace(request, cache_salt=self.salt))


Ways = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
APART: dict[str, Ways] = {
    "two tokens": ({}, {"token": TOKENS[0]}, {"token": TOKENS[1]}),
    "two salts": ({}, {"salt": "a"}, {"salt": "b"}),
    "a salt and none": ({}, {"salt": "a"}, {}),
    "a token's two salts": ({}, {"token": TOKENS[0], "salt": "a"}, {"token": TOKENS[0], "salt": "b"}),
    "sharing, but a salt": ({"share_between_callers": "suffix,prefix"}, {}, {"salt": "b"}),
}
TOGETHER: dict[str, Ways] = {
    "sharing": (
        {"share_between_callers": "suffix,prefix"},
        {"token": TOKENS[0]},
        {"token": TOKENS[1]},
    ),
    "one token": ({}, {"token": TOKENS[0]}, {"token": TOKENS[0]}),
    "one address": ({}, {}, {}),
    "one salt": ({}, {"salt": "a"}, {"salt": "a"}),
}


@asynccontextmanager
async def two_callers(
    ways: Ways, target: str, draft: str | None, tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[Caller, Caller]]:
    """Run a coordinator over services at these addresses; yield two callers of it."""
    own, *each = ways
    if any("token" in way for way in each):
        options["auth_token_file"] = tmp_path / "tokens"
        options["auth_token_file"].write_text("\n".join(TOKENS))
    usual = {"draft_ahead": "off", "num_speculative_tokens": K}
    settings = settings_for(target, draft, **(usual | own | options))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(HANG_SECONDS))
        address = await stack.enter_async_context(_served(settings))
        callers = []
        for way in each:
            credentials = Credentials(token=way.get("token", ""))
            client = await stack.enter_async_context(Client(address, credentials))
            callers.append(Caller(client, way.get("salt")))
        yield callers[0], callers[1]


@asynccontextmanager
async def _served(settings: CoordinatorSettings) -> AsyncIterator[str]:
    """The address of a coordinator that asks for its tokens."""
    service = CoordinatorService(settings)
    server = new_server(settings, RunningCalls(), *service.steps)
    await service.start()
    try:
        service.register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await service.close()


# ---- an answer, read from a suffix tree


async def read_on(attacker: Caller, known: Sequence[int]) -> list[int]:
    """Tokens that are proposed behind the known ones, which a lossy rule takes.

    A form lets the answer begin with the last known token; it would be proposed itself if the form left no choice.
    """
    last = TOKENIZER.decode(known[-1:])
    other = next(letter for letter in LETTERS if letter != last)
    grammar = Grammar(GrammarKind.REGEX, f"[{last}{other}][{LETTERS}]{{400}}")
    for seed in range(16):
        attack = GenerationRequest(
            tuple(known[:-1]), max_tokens=TOLD, temperature=1e6, seed=seed, grammar=grammar
        )
        done = await attacker.complete(attack)
        if done.token_ids[0] == known[-1]:
            return list(done.token_ids[1 : done.drafted.index(False, 1)])
    raise AssertionError("the answer never began with the last known token")


async def read_all(attacker: Caller, told: Sequence[int]) -> list[int]:
    """The known tokens of an answer, and all that the attacker reads behind them."""
    known = list(told[:KNOWN])
    while len(known) < len(told) and (read := await read_on(attacker, known)):
        known += read
    return known


async def count_drafted(attacker: Caller, told: Sequence[int]) -> list[list[int]]:
    """Tokens drafted at temperature 0 behind the known tokens and each guess of the next one, at each of some lengths.

    The bias lets the answer begin with the guess, so its text does not depend on drafts.
    """
    table = []
    for length in range(KNOWN, KNOWN + 4):
        counts = []
        for guess in LETTER_IDS:
            request = GenerationRequest(
                tuple(told[:length]), max_tokens=K + 2, temperature=0.0, logit_bias={guess: 100.0}
            )
            done = await attacker.complete(request)
            assert done.token_ids[0] == guess
            counts.append(done.summary.speculation.drafted)
        table.append(counts)
    return table


Observe = Callable[[Caller, Sequence[int]], Awaitable[Any]]
Observed = Callable[[Observe, Sequence[int] | None], Awaitable[tuple[Sequence[int], Any]]]


@pytest.fixture
def observed(model: LoadedModel, tmp_path: Path, ways: Ways) -> Observed:
    """Runs an attack after the first caller was told an answer; or, with the answer, without anybody having been."""

    async def run(observe: Observe, answer: Sequence[int] | None = None) -> tuple[Sequence[int], Any]:
        # Typical acceptance, where an operator has set it, takes whatever is proposed at a high temperature.
        rule = {"rejection_sampling_strategy": "typical-acceptance"}
        async with (
            services(model, model_free(suffix_proposer)) as addresses,
            two_callers(ways, *addresses, tmp_path, **rule) as (first, second),
        ):
            told = (await first.complete(SECRET)).token_ids if answer is None else answer
            assert len(told) == TOLD
            return told, await observe(second, told)

    return run


@pytest.mark.parametrize("ways", APART.values(), ids=APART)
async def test_an_answer_leaves_no_trace_in_proposals_for_another_caller(observed: Observed) -> None:
    for observe in (read_all, count_drafted):
        told, after = await observed(observe, None)
        _, before = await observed(observe, told)
        assert after == before


@pytest.mark.parametrize("ways", TOGETHER.values(), ids=TOGETHER)
async def test_callers_that_share_read_the_answer(observed: Observed) -> None:
    """So that the attacks are attacks."""
    told, read = await observed(read_all, None)
    # The draft is not told of the tokens of the last round
    assert common_length(told, read) >= TOLD - K - 1
    told, table = await observed(count_drafted, None)
    for length, counts in enumerate(table, KNOWN):
        likeliest = [guess for guess, count in zip(LETTER_IDS, counts, strict=True) if count == max(counts)]
        assert likeliest == [told[length]]


# ---- an answer, read at the draft's own port


class WatchedDraft(DraftServicer):
    """Writes down the scopes with which a coordinator opens sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: list[str] = []

    async def serve_sequence(self, sequence: DraftedFor) -> None:
        self.scopes.append(sequence.options.scope)
        await super().serve_sequence(sequence)


async def read_at_port(address: str, told: Sequence[int], scope: str) -> list[int]:
    """The known tokens of an answer, and all that the draft proposes behind them to a sequence of this scope."""
    known = list(told[:KNOWN])
    options = DraftOptions("r", GREEDY, scope=scope, row_kind=RowKind.TOKEN)
    async with grpc.aio.insecure_channel(address) as channel:
        subject = Subject(channel, await DraftClient(channel).model_info(), HANG_SECONDS)
        async with Conversation(subject) as talk:
            read = 0
            while len(known) < len(told):
                proposal = await talk.ask(known, read, count=K, options=options)
                if not proposal.token_ids:
                    break
                read = len(known)
                known += proposal.token_ids
    return known[: len(told)]


SOMETHING_ELSE = GenerationRequest("Numbers:", max_tokens=2 * K, temperature=0.0)


@pytest.mark.parametrize(
    ("ways", "are_apart"),
    [(ways, True) for ways in APART.values()] + [(ways, False) for ways in TOGETHER.values()],
    ids=[*APART, *TOGETHER],
)
async def test_the_port_of_a_draft_tells_an_answer_in_its_own_scope_alone(
    model: LoadedModel, tmp_path: Path, ways: Ways, are_apart: bool
) -> None:
    """Though the draft asks for no token. Who names the scope of the caller itself reads the answer."""
    watched = WatchedDraft()
    async with (
        services(model, model_free(suffix_proposer, watched)) as (target_address, address),
        two_callers(ways, target_address, address, tmp_path) as (first, second),
    ):
        assert address is not None
        told = (await first.complete(SECRET)).token_ids
        await second.complete(SOMETHING_ELSE)
        own, other = watched.scopes
        strangers = {"", "a guess", "0" * len(own)}
        read = {scope: await read_at_port(address, told, scope) for scope in {own, other} | strangers}
    async with serving(model_free(suffix_proposer)) as (unspoilt, _):
        before = await read_at_port(unspoilt, told, "")
    assert {scope for scope in read if read[scope] != before} == ({own} if are_apart else {own, other})
    assert are_apart == (own != other)
    # The draft is not told of the tokens of the last round
    assert common_length(told, read[own]) >= TOLD - K - 1


# ---- a prompt, recognised in a prefix cache


PROMPT_TOKENS = 150
"""More than two pages."""
LONG_PROMPT = GenerationRequest(
    tuple(range(300, 300 + PROMPT_TOKENS)), max_tokens=4, temperature=0.0, ignore_eos=True
)


class ComputedTokens:
    """Counts the tokens that an engine computes."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, record: StepRecord) -> None:
        self._count += record.token_count

    def take(self) -> int:
        """The count since the last call."""
        count = self._count
        self._count = 0
        return count


async def computed_by_each(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path, ways: Ways
) -> tuple[list[tuple[int, int]], list[int | None]]:
    """Tokens that target and draft compute for the prompt of the first caller, for the same of the second one, and for
    the first one's once more; and tokens of each that were computed before, as the callers are told."""
    target_tokens = ComputedTokens()
    draft_tokens = ComputedTokens()
    counts = []
    told = []
    async with (
        target(model, Faults(), on_step=target_tokens.add) as (target_address, _),
        draft(other_model, on_step=draft_tokens.add) as (draft_address, _),
        two_callers(ways, target_address, draft_address, tmp_path, num_speculative_tokens=2) as callers,
    ):
        first, second = callers
        for caller in (first, second, first):
            target_tokens.take()
            draft_tokens.take()
            answer = await caller.complete(LONG_PROMPT)
            counts.append((target_tokens.take(), draft_tokens.take()))
            assert answer.summary is not None
            told.append(answer.summary.cached_tokens)
    return counts, told


@pytest.mark.parametrize("ways", APART.values(), ids=APART)
async def test_a_prompt_is_computed_anew_for_another_caller(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path, ways: Ways
) -> None:
    (first, second, again), told = await computed_by_each(model, other_model, tmp_path, ways)
    assert told[:2] == [0, 0], "nobody is told what another caller has sent"
    assert (told[2] or 0) > PROMPT_TOKENS / 2
    assert min(first) >= PROMPT_TOKENS
    assert min(second) >= PROMPT_TOKENS
    assert max(again) < PROMPT_TOKENS / 2, "its own caller's is still there"


SHARED_PREFIXES: Ways = (
    {"share_between_callers": "prefix"},
    {"token": TOKENS[0]},
    {"token": TOKENS[1]},
)


@pytest.mark.parametrize(
    "ways", [*TOGETHER.values(), SHARED_PREFIXES], ids=[*TOGETHER, "sharing prefixes alone"]
)
async def test_callers_that_share_compute_a_prompt_once(
    model: LoadedModel, other_model: LoadedModel, tmp_path: Path, ways: Ways
) -> None:
    (first, second, again), told = await computed_by_each(model, other_model, tmp_path, ways)
    assert told[0] == 0
    assert min(told[1] or 0, told[2] or 0) > PROMPT_TOKENS / 2
    assert min(first) >= PROMPT_TOKENS
    assert max(*second, *again) < PROMPT_TOKENS / 2


# ---- salts and scopes that are refused


@pytest.mark.parametrize(("salt", "size"), [("", "0 characters"), ("s" * 257, "257 characters")])
async def test_a_salt_without_or_with_too_many_characters_is_refused(salt: str, size: str) -> None:
    sentence = f"cache_salt has {size}; it must have 1 to 256"
    counted = FakeTarget()
    async with http_cluster(counted) as cluster:
        status, error = await post(cluster, prompt=[5], max_tokens=2, cache_salt=salt)
        assert (status, error["message"]) == (400, sentence)
        answer = await cluster.http.post(
            "/v1/completions", json={"prompt": [5], "max_tokens": 2, "cache_salt": "s" * 256}
        )
        assert answer.status_code == 200
    async with served(counted) as (one,), coordinated(one.address) as (client, _):
        with pytest.raises(InvalidRequestError, match=sentence):
            await complete(client, GenerationRequest((5,), max_tokens=2, cache_salt=salt))
        assert (
            await complete(client, GenerationRequest((5,), max_tokens=2, cache_salt="s" * 256))
        ).token_ids == (6, 7)


@pytest.mark.parametrize("size", [MAX_SCOPE_LENGTH, MAX_SCOPE_LENGTH + 1])
@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_scope_with_too_many_characters_ends_its_sequence(
    model: LoadedModel, role: str, size: int
) -> None:
    """The others of the stream go on."""
    scope = "s" * size
    async with services(model, model_free(suffix_proposer)) as (target_address, draft_address):
        address = target_address if role == "target" else draft_address
        assert address is not None
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(HANG_SECONDS):
            endings = await (endings_of_target if role == "target" else endings_of_draft)(channel, scope)
    refused = Ending(
        grpc.StatusCode.INVALID_ARGUMENT, f"scope has {size} characters; it must have at most 64"
    )
    assert endings == {1: Ending() if size <= MAX_SCOPE_LENGTH else refused, 2: Ending()}


async def endings_of_draft(channel: grpc.aio.Channel, scope: str) -> dict[int, Ending]:
    """How a sequence of this scope and one without a scope end on a draft."""
    call: Any = channel.stream_stream("/tandem.v1.DraftService/Propose")()
    opens = [(1, DraftOptions("r", GREEDY, scope=scope)), (2, DraftOptions("r", GREEDY))]
    requests = draft_wire.requests_to_proto([*opens, (1, Finish(0)), (2, Finish(0))])
    await call.write(requests.SerializeToString())
    endings: dict[int, Ending] = {}
    while len(endings) < len(opens):
        message = draft_pb2.ProposeResponse.FromString(await call.read())
        answers = draft_wire.answers_from_proto(message)
        endings |= {number: answer for number, answer in answers if isinstance(answer, Ending)}
    call.cancel()
    return endings


async def endings_of_target(channel: grpc.aio.Channel, scope: str) -> dict[int, Ending]:
    """How a sequence of this scope and one without a scope end on a target."""
    call: Any = channel.stream_stream("/tandem.v1.TargetService/Verify")()
    opens = [(1, TargetOptions("r", GREEDY, scope=scope)), (2, TargetOptions("r", GREEDY))]
    requests = target_wire.requests_to_proto([*opens, (1, Finish(0)), (2, Finish(0))])
    await call.write(requests.SerializeToString())
    endings: dict[int, Ending] = {}
    while len(endings) < len(opens):
        message = target_pb2.VerifyResponse.FromString(await call.read())
        answers = target_wire.answers_from_proto(message)
        endings |= {number: answer for number, answer in answers if isinstance(answer, Ending)}
    call.cancel()
    return endings

"""What one caller was told reaches no other: the attacks by which it was read, each also where callers share.

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

import pytest
from tokenizers import Tokenizer

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.proposers.suffix import suffix_proposer
from tandem.client import Client, Completed
from tandem.engine.models.loading import LoadedModel
from tandem.rpc.credentials import Credentials
from tandem.serving.interceptors import RunningCalls
from tandem.serving.server import new_server
from tandem.types import GenerationRequest, Grammar, GrammarKind, common_length
from tests.paths import DEMO_TARGET
from tests.service.clients import complete
from tests.service.engines import model_free, services
from tests.service.fakes import HANG_SECONDS, settings_for

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

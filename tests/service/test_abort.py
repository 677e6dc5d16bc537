"""An administrator aborts a request: its client gets the reason, and every service frees it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tandem.errors import AbortedError
from tandem.types import GenerationRequest
from tests.service.clients import complete, until
from tests.service.fakes import FakeDraft, FakeTarget, fleet

REQUEST = GenerationRequest((10,), max_tokens=40, temperature=0.0, num_speculative_tokens=2, seed=1)


async def test_an_abort_during_a_step_reaches_the_client_at_once() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with fleet(target, draft) as (client, _, service):
        requests = service.completions.requests
        work = asyncio.create_task(complete(client, REQUEST))
        target.step_seconds = 0.05
        await until(lambda: any(request.completion_tokens > 3 for request in requests.list()), 10)
        (active,) = requests.list()
        target.step_seconds = 30.0  # the next answer would take half a minute
        await until(lambda: active.completion_tokens > 3, 10)
        active.abort("making room")
        tokens = active.completion_tokens
        with pytest.raises(AbortedError, match=f"ended the request after {tokens} tokens: making room"):
            await asyncio.wait_for(work, 5)
        await until(lambda: not requests.list() and target.running == draft.running == 0, 5)
        assert (requests.outcomes.aborted, requests.outcomes.completed) == (1, 0)
        target.step_seconds = 0.0
        assert (await complete(client, REQUEST)).token_ids == tuple(range(11, 51))
        assert (requests.outcomes.aborted, requests.outcomes.completed) == (1, 1)
        assert requests.tokens.total == tokens + 40
        assert target.finished == 1


async def test_an_abort_frees_the_services_while_the_client_does_not_read() -> None:
    """The generator is suspended at a yield, where there is no task to cancel."""
    target, draft = FakeTarget(), FakeDraft()
    async with fleet(target, draft) as (_, _, service):
        requests = service.completions.requests
        async with aclosing(service.completions.complete(REQUEST)) as chunks:
            await anext(chunks)
            await anext(chunks)
            (active,) = requests.list()
            active.abort()
            active.abort("a second time does nothing")
            await until(lambda: target.running == draft.running == 0, 5)
            with pytest.raises(AbortedError, match=r"after 4 tokens$"):
                await anext(chunks)
        assert requests.list() == []
        assert requests.outcomes.aborted == 1


async def test_a_disconnecting_client_is_not_an_abort() -> None:
    target = FakeTarget()
    target.step_seconds = 0.05
    async with fleet(target, FakeDraft()) as (client, _, service):
        async with aclosing(client.generate(REQUEST)) as chunks:
            await anext(chunks)
        requests = service.completions.requests
        await until(lambda: requests.outcomes.cancelled == 1, 5)
        assert requests.outcomes.aborted == 0

"""Random interleavings of all operations of an engine, with pages for three sequences, against a plain model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from tandem.engine.core import scheduler
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Job
from tandem.engine.interface import EngineSettings
from tandem.engine.kv_cache.sequence import Sequence
from tandem.types import Delta
from tests.unit.engine.conftest import MakeModel, TinyModel
from tests.unit.engine.greedy import RowsHead, plain_logits, settle

T = TypeVar("T")

_MAX_LENGTH = 96
_TOTAL_TOKENS = 3 * 128

_tokens = st.lists(st.integers(3, 6), min_size=1, max_size=30)  # few ids, so that texts often agree by chance
_choice = st.integers(0, 1 << 16)
_share = st.floats(0, 1)


@dataclass
class Client:
    """The state that one user of the engine expects."""

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    is_sure: bool = True
    """True if the engine is known to have the same tokens; False after a cancelled request."""
    answers: list[tuple[asyncio.Task[Tensor], list[int], int]] = field(default_factory=list)
    """Requests in flight: the task, the tokens that it should see, and its number of rows."""


class Interleavings(RuleBasedStateMachine):
    """Clients that open, extend, cancel and release sequences."""

    model: TinyModel

    @initialize(chunk=st.sampled_from([5, 64]), prefix_reuse=st.booleans())
    def start(self, chunk: int, prefix_reuse: bool) -> None:
        self.loop = asyncio.new_event_loop()
        bytes_per_token = 4 * sum(layer.values_per_token for layer in self.model.loaded.layers)
        self.engine: Engine[Any, Any] = Engine(
            self.model.backends if self.model.backends.native is None else self.model.with_plans,
            RowsHead(),
            EngineSettings(
                max_length=_MAX_LENGTH,
                kv_cache_bytes=_TOTAL_TOKENS * bytes_per_token,
                prefill_chunk_tokens=chunk,
                prefix_reuse=prefix_reuse,
            ),
        )
        self.clients: list[Client] = []
        self.waiting: list[asyncio.Task[Sequence]] = []
        self._run(self._start())

    @rule(tokens=_tokens)
    def open(self, tokens: list[int]) -> None:
        self.waiting.append(self._spawn(self.engine.open(_MAX_LENGTH)))
        self._admit()
        if self.clients:
            self._say(self.clients[-1], Delta(0, tokens), 1)

    @precondition(lambda self: self.clients)
    @rule(choice=_choice, tokens=_tokens, keep=_share, rows=_share)
    def say(self, choice: int, tokens: list[int], keep: float, rows: float) -> None:
        """A delta that starts anywhere in what is there, or at 0 if the client is not sure what that is."""
        client = self._pick(choice)
        base_length = round(keep * len(client.token_ids)) if client.is_sure else 0
        base_length = min(base_length, _MAX_LENGTH - len(tokens))
        self._say(client, Delta(base_length, tokens), round(rows * (base_length + len(tokens))))

    @precondition(lambda self: self.clients)
    @rule(choice=_choice)
    def repeat(self, choice: int) -> None:
        """The whole text again, as to a fresh replica."""
        client = self._pick(choice)
        self._say(client, Delta(0, list(client.token_ids)), min(2, len(client.token_ids)))

    @precondition(lambda self: self.clients)
    @rule(choice=_choice, turns=st.integers(0, 3))
    def cancel(self, choice: int, turns: int) -> None:
        """Cancel the latest request at a random moment."""
        client = self._pick(choice)
        if client.answers:
            self._run(self._turns(turns))
            task, _, _ = client.answers.pop()
            task.cancel()
            client.is_sure = False

    @precondition(lambda self: self.clients)
    @rule(choice=_choice)
    def release(self, choice: int) -> None:
        """Release the sequence, with or without waiting for the answers."""
        client = self.clients.pop(choice % len(self.clients))
        if choice % 2:
            self._check(client)
        for task, _, _ in client.answers:
            task.cancel()
        self.engine.release(client.sequence)

    @precondition(lambda self: self.waiting)
    @rule()
    def give_up_waiting(self) -> None:
        self.waiting.pop().cancel()

    @rule()
    def check_all(self) -> None:
        for client in self.clients:
            self._check(client)

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self._run(self._turns(2))
        self._admit()
        usage = self.engine.usage
        assert usage.total_tokens == _TOTAL_TOKENS
        assert usage.reserved_tokens + usage.retained_tokens <= _TOTAL_TOKENS
        assert usage.reserved_tokens <= 128 * usage.sequence_count

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for waiting in self.waiting:
            waiting.cancel()
        self._run(self._turns(1))
        for client in self.clients:
            self._check(client)
            self.engine.release(client.sequence)
        self._run(settle(self.engine))
        self._run(self.engine.close())
        self.loop.close()

    def _pick(self, choice: int) -> Client:
        return self.clients[choice % len(self.clients)]

    def _say(self, client: Client, delta: Delta, row_count: int) -> None:
        client.token_ids[delta.base_length :] = delta.token_ids
        client.is_sure = client.is_sure or delta.base_length == 0
        job = Job(client.sequence, delta, row_count, None)
        client.answers.append((self._spawn(self.engine.submit(job)), list(client.token_ids), row_count))

    def _check(self, client: Client) -> None:
        for task, token_ids, row_count in client.answers:
            rows = self._run(asyncio.wait_for(task, 20))
            if row_count:
                expected = plain_logits(self.model.reference, token_ids)[-row_count:]
                assert torch.allclose(rows, expected, atol=1e-3)
        client.answers.clear()

    def _admit(self) -> None:
        """Check the requests that have completed."""
        self.clients.extend(Client(task.result()) for task in self.waiting if task.done())
        self.waiting = [task for task in self.waiting if not task.done()]

    async def _start(self) -> None:
        self.engine.start()

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0.0005)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.loop.create_task(coroutine)
        self._run(self._turns(0))
        return task

    def _run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)


@pytest.mark.parametrize("family", ["llama", "mistral", "falcon"])
def test_random_interleavings(family: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "IDLE_SECONDS", 0.02)  # clients sit on their pages as long as they like
    machine = type("Machine", (Interleavings,), {"model": tiny_model(family)})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=12,
        stateful_step_count=25,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    case().runTest()

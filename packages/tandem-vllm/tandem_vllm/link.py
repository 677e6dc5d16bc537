"""The plug-in's connection to the drafts: a thread with an event loop, and the sequences that live on it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from tandem.config import SpeculativeConfig
from tandem.config.rule import broken
from tandem.engine.models.checkpoint import TOKENIZER_FILE, tokenizer_hash
from tandem.errors import CapacityError, ModelFolderError, ServiceUnavailableError, TandemError
from tandem.model.replica import ReplicaState, Role
from tandem.model.types import AheadBudget, Coverage, DraftOptions, ModelInfo, Proposal
from tandem.rpc.addresses import split_addresses
from tandem.serving.scopes import RequestScopes
from tandem_coordinator.drafting import (
    MODEL_RULES,
    Coming,
    Deployment,
    DraftClient,
    DraftLimits,
    DraftPlacement,
    DraftSequence,
    Idle,
    Member,
    Miss,
    OpenSequence,
    Pool,
    needs_mapping,
    tokens_after_hit,
)
from tandem_vllm.metrics import Counts
from tandem_vllm.settings import VllmSettings

logger = logging.getLogger(__name__)

_RULES = [rule for rule in MODEL_RULES if rule.name in {"vocabulary-size", "tokenizer"}]
"""The coordinator's rules that hold here too. Lengths may differ: past a draft's, nothing is proposed."""


def target_info(model_config: Any, tensor_parallel_size: int) -> ModelInfo:
    """vLLM's model, described as a service describes its own."""
    try:
        own_hash = tokenizer_hash(tokenizer_folder(model_config))
    except ModelFolderError as error:
        logger.warning("tokenizers cannot be compared; sizes are", extra={"reason": str(error)})
        own_hash = ""
    return ModelInfo(
        name=str(model_config.model),
        architecture="",
        vocabulary_size=int(model_config.get_vocab_size()),
        tokenizer_hash=own_hash,
        max_length=int(model_config.max_model_len),
        dtype="",
        tensor_parallel_size=tensor_parallel_size,
    )


def tokenizer_folder(model_config: Any) -> Path:
    """Folder of the tokenizer, which may be named by a Hugging Face id, in whose cache vLLM has downloaded it."""
    name = str(model_config.tokenizer or model_config.model)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, TOKENIZER_FILE)
    except ValueError:  # it is no such id
        found = None
    return Path(found).parent if isinstance(found, str) else Path(name)


def why_unfit(target: ModelInfo, draft: ModelInfo) -> str:
    """Reason why a draft cannot propose for a target; empty where it can."""
    rules = [rule for rule in _RULES if target.tokenizer_hash or rule.name != "tokenizer"]
    return "; ".join(broken(rules, Deployment(SpeculativeConfig(), target, draft)))


def draft_pool(settings: VllmSettings, target: ModelInfo, tokenizer: Path) -> Pool[DraftClient]:
    """The drafts that the settings name, as far as they fit. Construct it on the event loop that is to use it."""

    async def map_vocabulary(client: DraftClient, draft: ModelInfo) -> Coverage | None:
        if not target.tokenizer_hash or not needs_mapping(draft, target):
            return None
        content = await asyncio.to_thread((tokenizer / TOKENIZER_FILE).read_bytes)
        return await client.map_vocabulary(target, content)

    return Pool(
        Role.DRAFT,
        split_addresses(settings.draft_address or ""),
        settings.resolve_interval_seconds,
        DraftClient,
        lambda info: why_unfit(target, info),
        settings.service_credentials,
        map_vocabulary=map_vocabulary,
    )


async def first_draft(pool: Pool[DraftClient], seconds: float) -> str:
    """Wait for the first draft: empty when it is ready, otherwise the reason why none is, once that is known."""
    try:
        async with asyncio.timeout(seconds):
            while pool.choose() is None:
                shots = pool.snapshots()
                if shots and all(shot.state is ReplicaState.INCOMPATIBLE for shot in shots):
                    break
                await pool.change()
    except TimeoutError:
        pass
    return "" if pool.choose() is not None else pool.reasons()


@dataclass(frozen=True, slots=True)
class AskedRow:
    """One sequence of a step."""

    row: DraftedRow
    new_tokens: Sequence[int]
    """Tokens since its last step."""
    count: int
    """Tokens to propose; 0: only take note of the tokens."""


NOTHING = Proposal(0)
"""The answer of a draft that has nothing to propose, or not in time."""


@dataclass(slots=True)
class Batch:
    """One step: what it asks, and the answers so far."""

    rows: Sequence[AskedRow]
    until: float = 0.0
    """Time at which the step goes on without missing answers, by the monotonic clock."""
    ended: Sequence[DraftedRow] = ()
    budget: AheadBudget | None = None
    expected: Sequence[float] = ()
    """Expected tokens of a step with a proposal of 0, 1, ... tokens."""
    tokens_per_second: float = 0.0
    """Speed of a sequence now."""
    answers: list[Proposal] = field(default_factory=list)
    """One for each row; without tokens until it has come."""
    done: threading.Event = field(default_factory=threading.Event)
    left: int = 0
    """Answers that are still to come."""
    timed_out: bool = False
    """True if the wait for one of them was in vain."""

    def __post_init__(self) -> None:
        self.answers = [NOTHING for _ in self.rows]


class DraftedRow:
    """A request of vLLM's, from its first step on: its tokens, and its place on a draft."""

    placement: DraftPlacement
    """Set by the link with its first step."""

    def __init__(
        self, options: DraftOptions, scopes: RequestScopes, limits: DraftLimits, counts: Counts
    ) -> None:
        """`options` and `scopes` are those with which its sequence opens."""
        # vLLM's thread has these three, the event loop all others.
        self.told = 0
        """Tokens that were handed over."""
        self.has_sampled = False
        """True from the step on that has read its prompt to the end."""
        self.proposed = 0
        """Tokens proposed for it in the last step that it had a row in."""
        self._options = options
        self._scopes = scopes
        self._limits = limits
        self._counts = counts
        self.token_ids = array("i")
        self._unread: list[int] = []
        """Tokens that came while a proposal was awaited."""
        self.timed_out = False
        """True if the last step waited for its proposal in vain."""
        self.task: asyncio.Task[Proposal] | None = None

    def place_on(self, pool: Pool[DraftClient]) -> None:
        self.placement = DraftPlacement(pool, self._options, self._scopes, self._limits, self._lost)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def begin(self, asked: AskedRow, batch: Batch) -> asyncio.Task[Proposal] | None:
        """Add the tokens and propose for a step; None while a proposal is awaited.

        Until then its draft would be taken to have extended other tokens.
        """
        self._unread += asked.new_tokens
        if self.task is not None and not self.task.done():
            self._counts.late_rows += 1
            return None
        self.token_ids.extend(self._unread)
        self._unread = []
        self.task = asyncio.create_task(self._propose(asked.count, batch))
        return self.task

    async def _propose(self, wanted: int, batch: Batch) -> Proposal:
        """Tokens that may follow, none when no draft has any in time, with the distributions they were drawn from."""
        self.timed_out = False
        placement = self.placement
        try:
            placement.leave_for_better()
            if wanted <= 0:
                return NOTHING
            if placement.current is not None:
                return await self._ask(placement.current, wanted, batch)
        except TandemError as error:
            placement.lose(error)
        # A draft reads the sequence while vLLM works.
        member = placement.candidate(tokens=self)
        if member is not None and self._room(member) > self._limits.num_speculative_tokens:
            placement.enter(member, self)
        return NOTHING

    async def finish(self) -> None:
        if self.task is not None:
            await asyncio.wait({self.task}, timeout=_CLOSE_SECONDS)
        try:
            await self.placement.finish()
        finally:
            self.placement.leave()

    async def _ask(
        self, place: OpenSequence[DraftClient, DraftSequence], wanted: int, batch: Batch
    ) -> Proposal:
        sequence = place.sequence
        placement = self.placement
        counts = self._counts
        count = min(wanted, self._room(place.member))
        if count <= 0:
            return NOTHING
        until = batch.until
        drafted = await self._drafted_ahead(sequence, batch, until, count)
        if drafted is not None:
            sequence.go_on(self, drafted, batch.budget)
            placement.count_proposal()
            return drafted
        if not sequence.is_idle:
            counts.late_rows += 1
            return NOTHING  # it reads the prompt, or is late already
        if placement.must_read(self):
            return NOTHING
        proposal, _ = await placement.asked(self, count, max(until - time.monotonic(), 0.0), batch.budget)
        if proposal is None:
            self.timed_out = True
            counts.late_rows += 1
            return NOTHING
        placement.count_proposal()
        counts.answered_rows += 1
        return proposal

    async def _drafted_ahead(
        self, sequence: DraftSequence, batch: Batch, until: float, count: int
    ) -> Proposal | None:
        """The continuation of what vLLM has sampled, if the draft made it meanwhile; None without one."""
        outcome = sequence.outcome(self)
        if isinstance(outcome, Idle):
            return None
        self._counts.awaited_outcomes += 1
        if isinstance(outcome, Miss):
            return None
        drafted = outcome.proposal
        if isinstance(outcome, Coming):
            most = min(count, outcome.max_tokens, len(batch.expected) - 1)
            expected = batch.expected[: most + 1]
            worth = tokens_after_hit(expected, outcome, tokens_per_second=batch.tokens_per_second)
            if worth > outcome.ready:
                drafted = await sequence.rest(self, outcome, worth, until - time.monotonic())
        self._counts.hits += 1
        return drafted.cut(count)

    def _room(self, member: Member[DraftClient]) -> int:
        """Tokens that the draft can still propose within its own length."""
        most = 0 if member.model is None else member.model.max_length
        return most - self.length if most else self.length + 1

    def _lost(self, member: Member[DraftClient], error: TandemError) -> None:
        self._counts.lost_drafts += 1
        # A replica that goes down is reported once, by its member; here every sequence would repeat it.
        is_expected = isinstance(error, ServiceUnavailableError | CapacityError)
        logger.log(
            logging.DEBUG if is_expected else logging.WARNING,
            "draft lost",
            extra={"address": member.address, "reason": str(error)},
        )


_CLOSE_SECONDS = 2.0
"""Time for the sequences' streams to end: vLLM's own end must not wait for a draft that hangs."""
_START_SECONDS = 5.0
"""Time for the thread to start on a busy machine."""


class DraftLink:
    """Owns the thread, the pool and every sequence's place on a draft.

    vLLM's step is synchronous, so the drafts have an event loop and a thread of their own. A step hands over its
    sequences and waits, at most as long as its patience. What belongs to the loop (streams, pools, continuations) is
    never touched by another thread; answers cross in a `Batch`.
    """

    def __init__(self, make_pool: Callable[[], Pool[DraftClient]]) -> None:
        """`make_pool` is called on the loop."""
        self._make_pool = make_pool
        self._rows: set[DraftedRow] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._pool: Pool[DraftClient] | None = None
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-drafts", daemon=True)

    @property
    def open_sequences(self) -> int:
        return len(self._rows)

    def start(self, wait_seconds: float) -> str:
        """Start the thread, and wait for a draft: empty when one is ready, otherwise the reason why none is."""
        self._loop = self._runner.get_loop()
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(wait_seconds), self._loop)
        try:
            return opening.result(wait_seconds + _START_SECONDS)
        except TimeoutError:
            return "no draft answered"
        except TandemError as error:
            self.close()
            return str(error)

    def close(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(self._loop), self._loop)
            self._thread.join(_CLOSE_SECONDS)

    def ask(self, batch: Batch, seconds: float) -> None:
        """Have the drafts propose for a step, and wait until all have answered, at most so many seconds.

        Sequences without a draft, or whose draft owes an answer, have theirs at once: none.
        """
        if self._loop is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._begin, batch)
        if batch.rows and seconds > 0.0 and not batch.done.wait(seconds):
            batch.timed_out = True

    def _run(self) -> None:
        with self._runner as runner:
            runner.get_loop().run_forever()

    async def _open(self, wait_seconds: float) -> str:
        self._pool = self._make_pool()
        await self._pool.start()
        return await first_draft(self._pool, wait_seconds)

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for row in self._rows:
                if row.task is not None:
                    row.task.cancel()
            await asyncio.gather(*(row.finish() for row in self._rows), return_exceptions=True)
            self._rows.clear()
            if self._pool is not None:
                await self._pool.close()
            # gRPC tells of cancelled calls a little later, and a loop that is closed by then is an error to it.
            await asyncio.sleep(0.05)
        finally:
            loop.stop()

    def _begin(self, batch: Batch) -> None:
        """Start the work for a step's rows. Nothing here waits."""
        for row in self._rows.intersection(batch.ended):
            self._rows.remove(row)
            ending = asyncio.create_task(row.finish())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        batch.left = len(batch.rows)
        for index, asked in enumerate(batch.rows):
            row = asked.row
            if row not in self._rows:
                assert self._pool is not None, "batches come after the start"
                self._rows.add(row)
                row.place_on(self._pool)
            task = row.begin(asked, batch)
            if task is None:  # the row's last one goes on
                batch.left -= 1
            else:
                task.add_done_callback(partial(self._take_answer, batch, index, row))
        if batch.left == 0:
            batch.done.set()

    def _take_answer(self, batch: Batch, index: int, row: DraftedRow, task: asyncio.Task[Proposal]) -> None:
        batch.timed_out |= row.timed_out
        if not task.cancelled():
            error = task.exception()
            if error is None:
                batch.answers[index] = task.result()
            else:
                logger.error("a proposal failed", exc_info=error)
        batch.left -= 1
        if batch.left == 0:
            batch.done.set()

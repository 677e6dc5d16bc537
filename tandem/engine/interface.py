"""The seam between the services and the engines: all that a service knows of what runs its model.

The embedded engine (`tandem.engine.core`) stands behind it, and any other can that answers with rows, wherever it draws
them (`tandem.engine.rows`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np

from tandem.acceptance.rounds import Decide, Round, decide_each
from tandem.acceptance.strategies import AcceptanceRule
from tandem.errors import (
    ConfigurationError,
    InvalidRequestError,
    NonFiniteLogitsError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.model.grammar import GrammarState, MaskArray
from tandem.model.leading import Leading, decided_outcome, read_outcome
from tandem.model.sampling.noise import recovery_keys, target_keys
from tandem.model.types import (
    Acceptance,
    EngineStatistics,
    GoesOn,
    IntArray,
    ModelInfo,
    Proposal,
    RowKind,
    StepProfile,
    TargetOptions,
    TokenHistogram,
    Verification,
    VerifyStep,
)
from tandem.serving.fair_places import extra_places

if TYPE_CHECKING:
    from tandem.config.settings import ModelServerSettings

logger = logging.getLogger(__name__)

SequenceT = TypeVar("SequenceT")
"""A sequence in an engine's cache, as the engine knows it; to a service it is opaque."""

_NO_SUPPORT: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The rows that one sequence wants of a step, and how they are drawn."""

    step: VerifyStep
    """The delta, whose last tokens are the proposal, and the rows that are wanted."""
    options: TargetOptions
    """The sequence's. At its `max_length` and behind its end tokens it does not go on by itself."""
    grammar: GrammarState | None = None
    """The grammar of the completion; None for any text. Of the sequence, so that it is not shared."""
    on_led: Callable[[RowRequest, Verification | TandemError], None] | None = None
    """Takes the requests that go on by themselves with their answers, in order, on the event loop."""
    leading: Leading = field(default_factory=Leading)
    """How the sequence goes on by itself behind the step."""
    rule: AcceptanceRule | None = None
    """Decides on proposals of the target's own head; None where it makes none."""
    proposal: Proposal | None = None
    """The head's, once it has made it."""

    token_ids: Sequence[int] = ()
    """All of the sequence's tokens, the proposal's at the end. The engine fills them in where rows depend on them."""
    masks: MaskArray | None = None
    """The grammar's masks of the rows, which the engine fills in; None where nothing is constrained."""

    @property
    def base_length(self) -> int:
        """Length of the sequence whose next token the first row describes."""
        return self.step.delta.length - self.step.row_count + 1

    def with_tokens(self, token_ids: Sequence[int]) -> RowRequest:
        """The request with what its rows need of the sequence's tokens, and without the grammar, which stays in the
        process that has the sequence."""
        own = token_ids if self.options.reads_tokens else ()
        if self.grammar is None:
            return replace(self, token_ids=own) if own else self
        base = self.base_length
        masks = self.grammar.masks(token_ids[self.options.prompt_length : base], token_ids[base:])
        return replace(self, grammar=None, masks=masks, token_ids=own)

    def with_proposal(self, proposal: Proposal) -> RowRequest:
        """The request with what the target's own head has proposed."""
        assert self.rule is not None, "only a target with a head takes such steps"
        step = self.rule.step_with(self.step, proposal)
        return RowRequest(step, self.options, self.grammar, self.on_led, self.leading, self.rule, proposal)

    def go_on(
        self, answer: Verification, acceptance: Acceptance | None = None, token_ids: Sequence[int] = ()
    ) -> tuple[Verification, RowRequest | None]:
        """How the sequence goes on by itself: the answer, which says so, and the request that follows it, if any.

        Args:
            answer: To this request.
            acceptance: What the rule decides on the proposal of the target's own head. Behind a given one the row of
                each token decides.
            token_ids: All of the sequence's, where a grammar asks for them.
        """
        if self.proposal is None:
            outcome = read_outcome(self.step, answer)
        else:
            outcome = decided_outcome(answer, self.proposal, acceptance)
        goes_on = self.leading.find(outcome, self.options)
        if goes_on is None:
            return answer, None
        if self.grammar is not None and self._is_forced(self.grammar, goes_on, token_ids):
            return answer, None
        told = Verification(
            answer.base_length,
            answer.rows,
            answer.cost,
            answer.proposal,
            goes_on,
            cache=answer.cache,
            logprobs=answer.logprobs,
            features=answer.features,
        )
        return told, self._behind(goes_on)

    def following(self, answer: Verification) -> RowRequest | None:
        """The request with which the sequence goes on by itself, as an answer says; None where it does not."""
        return None if answer.goes_on is None else self._behind(answer.goes_on)

    def _behind(self, goes_on: GoesOn) -> RowRequest:
        """The request of a led step."""
        step = self.leading.step(goes_on, self.step.lead)
        # For every sequence between two steps of the target: `replace` takes three times as long.
        return RowRequest(step, self.options, self.grammar, self.on_led, self.leading, self.rule)

    def _is_forced(self, grammar: GrammarState, goes_on: GoesOn, token_ids: Sequence[int]) -> bool:
        """True if the completion ends behind the outcome's last token, or the coordinator proposes as many tokens there
        as the draft does, since the grammar forces them."""
        delta, own_tokens = goes_on
        completion = [*token_ids[self.options.prompt_length : delta.base_length], delta.token_ids[0]]
        count = max(len(delta.token_ids) - 1 if own_tokens is None else own_tokens, 1)
        try:
            can_follow = grammar.follow(completion) and not grammar.is_over
            return not can_follow or len(grammar.forced(count)) == count
        except InvalidRequestError:
            return True  # which the next step says

    @property
    def races_recovery(self) -> bool:
        """True if the rows' samples must use the recovery keys, with which the coordinator goes on. Without a proposal
        there is nothing to recover: the token is the target's own sample."""
        return self.step.row_kind is RowKind.SUPPORT and self.step.row_count > 1

    @property
    def supports(self) -> list[IntArray]:
        """The support of each row; an empty one for rows past the proposal."""
        supports = self.step.supports
        return [*supports, *[_NO_SUPPORT] * (self.step.row_count - len(supports))]

    @property
    def keys(self) -> IntArray:
        """The noise key of each row, int64 [row_count]."""
        keys_of = recovery_keys if self.races_recovery else target_keys
        return keys_of(self.options.sampling.seed, self.base_length, self.step.row_count)


def decide_own(
    requests: Sequence[RowRequest], answers: Sequence[Verification | None]
) -> list[Acceptance | None]:
    """Decide by the rules on the proposals of the target's own head, for each request that may be followed by another
    one; None for the others. Rounds of one rule are decided at once."""
    decided: list[Acceptance | None] = [None] * len(requests)
    rounds: dict[Decide, list[int]] = {}
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if answer is None or request.proposal is None or not request.step.lead:
            continue
        if request.rule is not None and request.rule.may_lead:
            rounds.setdefault(request.rule.decide, []).append(index)
    for decide, indices in rounds.items():
        own = []
        for index in indices:
            request = requests[index]
            answer = answers[index]
            assert request.proposal is not None
            assert answer is not None
            own.append(Round(request.proposal, answer, request.options.sampling))
        for index, found in zip(indices, decide_each(decide, own), strict=True):
            decided[index] = found if isinstance(found, Acceptance) else None
    return decided


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of one engine. Every field has a default that suits one model on one device."""

    max_length: int | None = None
    """Longest sequence, in tokens. None takes the model's own limit."""
    max_sequences: int = 64
    """Maximum sequences open at once, and in one forward pass."""
    kept_sequences: int = 0
    """Sequences among them that are kept for clients with few open."""
    max_waiting: int = 256
    """Requests that may wait for room before more are refused."""
    prefill_chunk_tokens: int = 512
    """Maximum prompt tokens in one step, so that a long prompt delays running sequences by one chunk at most."""
    kv_cache_bytes: int | None = None
    """Maximum size of the KV cache. None derives it from `device_memory_utilization`."""
    device_memory_utilization: float | None = None
    """Share of the device's memory that weights and KV cache of this process may fill together, whatever others take.
    None is 0.9 on an accelerator and 0.3 on a CPU, whose memory is shared with everything else. The cache never takes
    more than `max_sequences` could use."""
    prefix_reuse: bool = True
    """A new sequence reuses the KV of a prefix that another sequence, open or lately released, has computed."""

    step_timeout_seconds: float | None = None
    """How long a step may take before it counts as stuck. None learns it, see `tandem.engine.core.timing`."""

    @classmethod
    def of(cls, settings: ModelServerSettings) -> EngineSettings:
        """The limits that a service's options ask for on its device."""
        chunk = settings.max_num_batched_tokens
        if chunk is None:
            # On an accelerator vLLM's own default for serving, enough to keep it busy.
            chunk = 512 if settings.compute_device == "cpu" else 2048
        return cls(
            max_length=settings.max_length,
            max_sequences=settings.max_sequences + extra_places(settings.max_sequences),
            kept_sequences=extra_places(settings.max_sequences),
            prefill_chunk_tokens=chunk,
            kv_cache_bytes=settings.kv_cache_memory_bytes,
            device_memory_utilization=settings.device_memory_utilization,
            prefix_reuse=settings.enable_prefix_caching,
            step_timeout_seconds=settings.step_timeout_seconds,
        )

    def longest_sequence(self, model_name: str, model_length: int) -> int:
        """The longest sequence of a model that was made for `model_length` tokens."""
        if self.max_length is None:
            return model_length
        if self.max_length > model_length:
            raise ConfigurationError(
                f"max_length is {self.max_length}, but the model {model_name} was made for at most {model_length} "
                "tokens."
            )
        return self.max_length


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Usage of the KV cache, in tokens. A token's room is a place in each group of layers: those with a window need
    less, so more tokens than `total_tokens` may be in use."""

    total_tokens: int
    """Room in all."""
    reserved_tokens: int
    """Room in pages that open sequences hold, each page counted once."""
    used_tokens: int
    """Tokens of open sequences whose keys and values are computed. Shared ones count for each sequence."""
    retained_tokens: int
    """Room in pages that no sequence holds and whose content may be reused; taken whenever it is needed."""
    preemption_count: int
    """Number of times that a sequence had to give its pages to an older one."""
    sequence_count: int = 0
    waiting_count: int = 0
    """Requests that wait because too many sequences are open."""
    led_step_count: int = 0
    """Steps of sequences that went on by themselves."""
    wasted_step_count: int = 0
    """Those of them that nobody asked for in the end."""
    prefix_query_tokens: int = 0
    """Tokens that new sequences began with, as far as they could have been computed before."""
    prefix_hit_tokens: int = 0
    """Those of them that had been."""
    page_tokens: int = 0
    """Room of a page; 0 where there are none."""
    reuses_prefixes: bool = False
    step_tokens: TokenHistogram = field(default_factory=TokenHistogram)
    """Steps since the warm-up, by the tokens that they computed."""

    @property
    def statistics(self) -> EngineStatistics:
        """The part that a service tells its callers."""
        return EngineStatistics(
            kv_cache_tokens=self.total_tokens,
            reserved_tokens=self.reserved_tokens,
            page_tokens=self.page_tokens,
            reuses_prefixes=self.reuses_prefixes,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            step_tokens=self.step_tokens,
        )


class RunningModel(Protocol):
    """A model as its owner starts, watches and stops it."""

    @property
    def info(self) -> ModelInfo:
        """The model, with the longest sequence that is served, and what steps take (empty before `warm_up`)."""

    @property
    def usage(self) -> KvUsage:
        """Usage of the KV cache, and the number of sequences that wait for it."""

    @property
    def is_full(self) -> bool:
        """True if a new sequence would wait for a place, unless its client has few."""

    @property
    def overdue_seconds(self) -> float:
        """How long the step in progress has taken, once that is longer than any step should; 0 otherwise."""

    def start(self) -> None:
        """Begin to work, on the event loop that calls this."""

    async def warm_up(self) -> None:
        """Prepare what steps of each size need, so that no request pays for it, and measure the steps.

        Raises:
            NonFiniteLogitsError: the model computes NaN or infinity.
        """

    async def close(self) -> None:
        """Stop after the step in progress; whoever still waits gets a ServiceUnavailableError."""


class SequenceEngine(RunningModel, Protocol[SequenceT]):
    """Runs a model for many sequences at once, each with a cache of what it has computed."""

    async def open(self, max_length: int, *, client: str = "", scope: str = "") -> SequenceT:
        """A new, empty sequence of up to `max_length` tokens; waits while there is no place. A free place goes to the
        client that has the fewest. Sequences of a scope reuse what each other have computed; without a scope it shares
        nothing.

        Raises:
            InvalidRequestError: `max_length` is more than the engine serves.
            CapacityError: too many are open and too many wait already.
        """

    async def run(self, sequence: SequenceT, request: RowRequest) -> Verification:
        """Apply the step's delta and return the rows, computed together with whatever else waits.

        Raises:
            InvalidRequestError: the delta does not fit the sequence or the model.
            NonFiniteLogitsError: the model computed logits that are not finite.
        """

    def grant(self, sequence: SequenceT, asked: int, lead: int) -> None:
        """Let the sequence go on by itself up to `lead` steps beyond the one that was asked for last: the step `asked`
        since the last `run`."""

    def waits_for_pages(self, sequence: SequenceT) -> bool:
        """True if the step in progress waits for pages that other sequences have, or is computed again because they got
        its own."""

    def release(self, sequence: SequenceT) -> None:
        """Give the sequence's memory back. Steps of it that are in flight are dropped."""


@contextmanager
def non_finite_logits_logged(request_id: str) -> Iterator[None]:
    """Log a NonFiniteLogitsError of the block, which ends a request by no fault of its client."""
    try:
        yield
    except NonFiniteLogitsError as error:
        logger.error(  # noqa: TRY400 - the traceback would say nothing
            "logits are not finite", extra={"request_id": request_id, "reason": str(error)}
        )
        raise


class SleepingEngine(RunningModel):
    """Stands for an engine whose memory is freed."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def usage(self) -> KvUsage:
        return KvUsage(0, 0, 0, 0, 0)

    @property
    def is_full(self) -> bool:
        return True

    @property
    def overdue_seconds(self) -> float:
        return 0.0

    def start(self) -> None:
        raise ServiceUnavailableError("the model sleeps")

    async def warm_up(self) -> None:
        raise ServiceUnavailableError("the model sleeps")

    async def close(self) -> None:
        """It holds nothing."""


EngineT = TypeVar("EngineT", bound=RunningModel)
MadeT_co = TypeVar("MadeT_co", bound=RunningModel, covariant=True)


class ReloadableModel(Protocol[MadeT_co]):
    """A model whose weights can be replaced and freed: new ones are read beside the present ones, and an engine is made
    anew."""

    @property
    def info(self) -> ModelInfo:
        """The model, with its present weights."""

    def make_engine(self) -> MadeT_co:
        """An engine with empty caches over the present weights."""

    def load(self, folder: Path, version: int, *, continues: bool) -> Any:
        """Read and check the weights of a folder, on any thread; a ModelFolderError says why they cannot serve.

        Args:
            folder: The checkpoint.
            version: Of the new weights.
            continues: True if unfinished sequences of the present weights may go on with them.
        """

    def take(self, candidate: Any) -> Callable[[], None]:
        """Make weights that were loaded the present ones; returns what puts the old ones back."""

    def free(self, level: int) -> None:
        """Free memory once no engine runs: on level 1 the weights' on an accelerator, which the host's memory keeps;
        on level 2 the weights."""

    def restore(self) -> None:
        """Have the weights again where they were before `free`, on any thread."""


def free_unused() -> None:
    """Free what nothing refers to any more. An engine refers to itself in circles, and the first one is exempt from
    collections since the service's start."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


@dataclass(eq=False)
class EngineOwner(Generic[EngineT]):
    """The part that a target's verifier and the drafting methods with a model have in common."""

    _engine: EngineT
    model: ReloadableModel[EngineT] | None = field(default=None, kw_only=True)
    """Lets the weights be replaced; None where they cannot be."""
    fixed_because: str = field(default="", kw_only=True)
    """Reason why the weights cannot be replaced."""

    def kv_usage(self) -> KvUsage:
        return self._engine.usage

    @property
    def is_full(self) -> bool:
        return self._engine.is_full

    @property
    def overdue_seconds(self) -> float:
        return self._engine.overdue_seconds

    @property
    def is_asleep(self) -> bool:
        """True while no engine is there."""
        return isinstance(self._engine, SleepingEngine)

    async def start(self) -> None:
        self._engine.start()
        await self._engine.warm_up()

    async def close(self) -> None:
        await self._engine.close()

    # ---- other weights; none of these is called while a sequence is open

    def load_weights(self, folder: Path, version: int, *, continues: bool) -> Any:
        """See `ReloadableModel.load`. The old weights serve meanwhile."""
        return self._reloadable.load(folder, version, continues=continues)

    async def replace_weights(self, candidate: Any) -> None:
        """Serve with new weights and empty caches. Where the new ones cannot be served, the old ones are again, or
        sleep again."""
        model = self._reloadable
        was_asleep = self.is_asleep
        await self._stop_engine()
        put_back = model.take(candidate)
        try:
            await self._begin_engine()
        except Exception:
            await self._stop_engine()
            put_back()
            if not was_asleep:
                await self._begin_engine()
            raise
        self.forget_old_weights()
        await asyncio.to_thread(free_unused)  # the old weights

    async def sleep(self, level: int) -> None:
        """Free the KV cache, and of the weights what `ReloadableModel.free` says of the level."""
        model = self._reloadable
        await self._stop_engine()
        await asyncio.to_thread(model.free, level)

    async def wake_up(self) -> None:
        """Serve with the same weights as before."""
        await asyncio.to_thread(self._reloadable.restore)
        await self._begin_engine()

    def forget_old_weights(self) -> None:
        """Forget what was learned about the weights before."""

    async def _stop_engine(self) -> None:
        info = replace(self._engine.info, step_profile=StepProfile())
        await self._engine.close()
        self._engine = cast(EngineT, SleepingEngine(info))
        await asyncio.to_thread(free_unused)

    async def _begin_engine(self) -> None:
        engine = await asyncio.to_thread(self._reloadable.make_engine)
        self._engine = engine
        engine.start()
        await engine.warm_up()

    @property
    def _reloadable(self) -> ReloadableModel[EngineT]:
        if self.model is None:
            raise ConfigurationError(
                f"the weights cannot be replaced while the service runs: {self.fixed_because}"
            )
        return self.model

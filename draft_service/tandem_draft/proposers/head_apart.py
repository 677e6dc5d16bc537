"""An EAGLE-3 head on a device of its own: it reads the target's hidden states, which the coordinator brings.

Its sequence holds pairs of a token and the target's state one position earlier, as beside a target
(`tandem_target.head_drafter`), from the first position on whose state it was given. Within a proposal, and in what it
drafts ahead, its own states stand for the target's. They are computed again from the target's once these have come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.drafting.proposal import Conclusion, Drafting, check_room, extend_drafts, with_defaults
from tandem.drafting.tokens import check_start
from tandem.engine.core.background import HeadStart
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Continue, Done, Failed, Job, StepRecord
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.hidden_states import PairedStates, Pairing, as_model
from tandem.engine.interface import EngineOwner, EngineSettings
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.checkpoint import TOKENIZER_FILE, find_weights, weights_fingerprint
from tandem.engine.models.heads.eagle import Eagle3Head
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.rows import Sampler
from tandem.engine.steps import BranchStep
from tandem.errors import InvalidRequestError, ServiceUnavailableError, TandemError
from tandem.model.grammar import Grammars, GrammarState
from tandem.model.types import Delta, DraftOptions, HiddenStates, ModelInfo, Proposal, ProposeStep, Weights
from tandem.telemetry.streams import OnStep
from tandem_draft.proposers.ahead import AheadDrafter, BranchDrafting, OutcomeHistory, Pushed
from tandem_draft.settings import DraftSettings

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 1 << 20
"""Bound of the states in one message; targets send 64 KiB, or one position."""


# ---- states


@dataclass(frozen=True, slots=True)
class ReceivedStates:
    """Stands where a target's steps do beside one: its parts are of `StateBuffer`s."""

    target: LoadedModel
    state_size: int

    def read(self, parts: Sequence[tuple[StateBuffer, int, int]]) -> list[Tensor | None]:
        """See `StateSource`."""
        return [buffer.read(start, end) for buffer, start, end in parts]


class StateBuffer:
    """The target's states of one sequence, from the first position that has come. The event loop adds while the
    engine's thread reads what was there before."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.start = -1
        """Position of the first state; -1 before it has come."""
        self.end = 0
        """Position behind the last."""
        self._rows = torch.empty(64, width, dtype=dtype)

    def add(self, position: int, states: Tensor) -> None:
        """Take states from a position on, in place of those that were there."""
        if self.start < 0:
            self.start = position
        first = position - self.start
        last = first + len(states)
        if last > len(self._rows):
            grown = torch.empty(max(2 * len(self._rows), last), self._rows.shape[1], dtype=self._rows.dtype)
            grown[:first] = self._rows[:first]
            self._rows = grown
        self._rows[first:last] = states
        self.end = self.start + last

    def read(self, start: int, end: int) -> Tensor | None:
        """The states of pairs, counted from the first one."""
        return self._rows[start:end] if self.start >= 0 and end <= self.end - self.start else None


# ---- the engine


@dataclass(slots=True)
class HeadPass:
    """Passes of the head behind the pairs of a job: those that draw a proposal, or follow a given one."""

    pairing: Pairing
    buffer: StateBuffer
    read_length: int
    """Pairs that were read with the target's states."""
    known_length: int
    """Pairs that have the target's states."""
    drafting: Drafting | None = None
    """The proposal to draw; None where tokens are given."""
    given: Sequence[int] = ()
    """Tokens to read behind the pairs, one after the other."""
    rows: list[Tensor] | None = None
    """Logits of each pass, [vocabulary_size], for what is drafted ahead; None: nothing is."""


class HeadEngine(Engine[HeadPass, Proposal | None]):
    """Runs a head. Each job begins again behind the pairs that were read with the target's states."""

    shares_passes = False
    """Branches go on beside jobs, as they could in one pass, of which only the jobs' part is counted as a step: a paced
    service sleeps once for both. Otherwise they wait until no job runs."""
    _is_beside = False

    def _step(self) -> bool:
        has_run = super()._step()
        if self.shares_passes and not self._background.is_empty:
            self._is_beside = True
            self._background.run()
            self._is_beside = False
        return has_run

    def _stepped(self, record: StepRecord) -> StepRecord:
        return record if self._is_beside else super()._stepped(record)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._background._max_bytes = 0  # no branch is taken over
        self._background.max_step_tokens = 1024  # branches of 16 sequences

    def _start_job(self, job: Job[HeadPass] | None) -> None:
        passes = None if job is None else job.payload
        if job is not None and passes is not None:
            self._background.drop(job.sequence)
            job.sequence.apply(Delta(passes.read_length, ()))
            passes.pairing.begin(passes.buffer, passes.known_length)
        super()._start_job(job)


def follow_and_draw(
    ready: Sequence[Job[HeadPass]], logits: Tensor, sampler: Sampler
) -> list[Conclusion | Done[None]]:
    """Head of the engine: each row of logits becomes one more token of a proposal, or a given token is read next."""
    outcomes: list[Conclusion | Done[None]] = [Continue(-1)] * len(ready)
    drawing = [i for i, job in enumerate(ready) if job.payload.drafting is not None]
    if drawing:
        rows = logits if len(drawing) == len(ready) else logits[drawing]
        draftings = [each for job in ready if (each := job.payload.drafting) is not None]
        for i, outcome in zip(drawing, extend_drafts(draftings, rows, sampler), strict=True):
            outcomes[i] = outcome
    for i, job in enumerate(ready):
        passes = job.payload
        if passes.rows is not None:
            passes.rows.append(logits[i].clone())  # the next step overwrites them
        if passes.drafting is None:
            read = job.sequence.length - passes.known_length
            outcomes[i] = Continue(passes.given[read]) if read < len(passes.given) else Done(None)
        if passes.pairing.is_lost:
            outcomes[i] = Failed(ServiceUnavailableError("hidden states of the target are missing"))
    return outcomes


# ---- sequences


@dataclass(slots=True)
class HeadBranches(BranchDrafting):
    """Branches behind a proposal that the head has read up to its last token."""

    own_base: int = 0
    """Pairs before the proposal."""
    text_base: int = 0
    """Tokens before it."""
    earlier: Sequence[Tensor] = ()
    """Logits before each token of the proposal."""

    @property
    def base_length(self) -> int:
        return self.text_base

    @property
    def row_count(self) -> int:
        return 1

    @property
    def max_lead(self) -> int:
        return 0  # its own states must give way to the target's

    def begin(self, logits: Tensor, room: int, lead: HeadStart | None) -> BranchStep | None:
        rows = torch.stack([*self.earlier, logits[0].to(self.earlier[0])]) if self.earlier else logits
        # Called by name: a dataclass with slots is another class than the one that `super` knows.
        return BranchDrafting.begin(self, rows, room, None)

    def _step(self, token_ids: Sequence[int]) -> BranchStep | None:
        self._max_depth = self._token_count  # nothing is taken over, so the last tokens are not read
        if not token_ids or self._depth == self._max_depth:
            return None
        lengths = [self.own_base + accepted for accepted, _ in self._outcomes]
        return BranchStep(self.sequence, token_ids, lengths, self._depth, self._max_depth)


@dataclass(slots=True, eq=False)
class HeadAhead(AheadDrafter):
    """Drafts ahead with a head."""

    def begin_behind(
        self, step: ProposeStep, committed: Sequence[int], proposed: Sequence[int], passes: HeadPass
    ) -> None:
        """Draft ahead of the verification of a proposal, of which all but the last token were read."""
        assert step.ahead is not None
        if len(committed) + len(proposed) > self.cached.max_length:
            return
        self._token_ids[:] = [*committed, *proposed]
        completion = self._token_ids[self.options.prompt_length :] if self.grammar is not None else ()
        context = tuple(self._token_ids) if self.options.sampling.penalizes else None
        last = self._token_ids[-1]
        own_length = passes.known_length + len(proposed) - 1
        self._round = HeadBranches(
            self,
            Delta(own_length, (last,)),
            tuple(proposed),
            step.ahead,
            completion,
            None,
            context,
            own_base=passes.known_length,
            text_base=len(committed),
            earlier=passes.rows or (),
        )
        self.engine.put_back(self._round)


@dataclass(slots=True, eq=False)
class HeadSequence:
    """One sequence that a head drafts for."""

    engine: HeadEngine
    cached: CachedSequence
    options: DraftOptions
    fingerprint: str
    pairing: Pairing
    buffer: StateBuffer
    info: ModelInfo
    width: int
    ahead: HeadAhead | None
    grammar: GrammarState | None
    _token_ids: list[int] = field(default_factory=list, init=False)
    _read_length: int = field(default=0, init=False)
    """Pairs that were read with the target's states, and that nothing has changed since."""
    _unchanged_length: int = field(default=0, init=False)
    """Pairs that have not changed since the last job began."""
    _fault: str = field(default="", init=False)
    """Why nothing is drafted any more."""
    _unready_count: int = field(default=0, init=False)
    """Steps without the states that they need, since the last one that had them."""
    _following: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def pushed(self) -> Pushed | None:
        return None if self.ahead is None else self.ahead.pushed

    # ---- states

    def take_states(self, states: HiddenStates) -> None:
        """Take states of the target. What is wrong with them leaves the sequence without a draft."""
        if self._fault:
            return
        if fault := self._fault_of(states):
            self._give_up(fault)
            return
        count, width = states.shape
        dtype = getattr(torch, states.dtype)
        rows = torch.frombuffer(bytearray(states.data), dtype=dtype).view(count, width)
        if not bool(torch.isfinite(rows).all()):
            self._give_up("they hold numbers that are not finite")
            return
        self.buffer.add(states.first_position, rows)
        self._keep_read(states.first_position - self.buffer.start)

    def _keep_read(self, length: int) -> None:
        """Pairs behind so many have changed."""
        self._read_length = min(self._read_length, length)
        self._unchanged_length = min(self._unchanged_length, length)

    def _fault_of(self, states: HiddenStates) -> str:
        """What is wrong with the states; empty where nothing is."""
        if states.head != self.fingerprint:
            return f"they are for the head {states.head[:12] or 'without a name'}, and this is {self.fingerprint[:12]}"
        if states.layer_ids:
            return f"they are of the layers {list(states.layer_ids)}; they must be projected"
        if states.dtype != self.info.dtype:
            return f"they are {states.dtype}; they must be {self.info.dtype}"
        return self._wrong_size(states) or self._wrong_place(states)

    def _wrong_size(self, states: HiddenStates) -> str:
        count, width = states.shape
        row_bytes = self.width * torch.empty(0, dtype=getattr(torch, states.dtype)).element_size()
        size = len(states.data)
        if width != self.width or size != count * row_bytes:
            return f"{size} bytes came for {count} rows of {width} numbers; rows must have {self.width}"
        if size > max(MAX_PART_BYTES, row_bytes):
            return f"{size} bytes came at once, which are too many; {MAX_PART_BYTES} may"
        return ""

    def _wrong_place(self, states: HiddenStates) -> str:
        first = states.first_position
        end = first + states.shape[0]
        if end > self.cached.max_length:
            return (
                f"they reach position {end}, and the sequence has {self.cached.max_length} at most: too many"
            )
        if self.buffer.start >= 0 and not self.buffer.start <= first <= self.buffer.end:
            return f"they begin at position {first}, and those from {self.buffer.start} to {self.buffer.end} are there"
        return ""

    def _give_up(self, fault: str) -> None:
        self._fault = fault
        fields = {"request_id": self.options.request_id, "reason": fault}
        logger.warning("hidden states cannot be used; the sequence goes on without a draft", extra=fields)

    # ---- steps

    async def propose(self, step: ProposeStep) -> Proposal | None:
        """See `DraftedSequence`. Without the states that it needs, the proposal is empty."""
        self.close()
        committed = self._apply(step)
        proposed = self._token_ids[len(committed) :]
        is_ready = self._is_ready(len(committed), is_asked=step.token_count > 0)
        if not step.is_answered:
            if is_ready and self.ahead is not None:
                self._following = asyncio.create_task(self._follow(step, committed, proposed))
            return None
        check_room(self.cached, step.delta.length, step.token_count)
        if not is_ready or step.token_count == 0:
            return Proposal(len(committed))
        return await self._draw(step, committed)

    def close(self) -> None:
        """Follow the last proposal no further."""
        if self._following is not None:
            self._following.cancel()
            self._following = None

    def _apply(self, step: ProposeStep) -> list[int]:
        """Apply a step's delta; the committed tokens."""
        delta = step.delta
        check_start(delta, len(self._token_ids))
        if delta.length > self.cached.max_length:
            raise InvalidRequestError(
                f"the sequence would have {delta.length} tokens, but its limit is {self.cached.max_length}"
            )
        if self.ahead is not None:
            self.ahead.apply(step)
        self._token_ids[delta.base_length :] = delta.token_ids
        # A pair holds the token behind its state
        changed = max(delta.base_length - 1 - max(self.buffer.start, 0), 0)
        self._keep_read(changed)
        return self._token_ids[: len(self._token_ids) - step.proposed_count]

    def _is_ready(self, length: int, *, is_asked: bool) -> bool:
        """True if the states of all committed tokens but the last have come."""
        if self._fault:
            return False
        if self.buffer.start >= 0 and self.buffer.start < length - 1 <= self.buffer.end:
            self._unready_count = 0
            return True
        self._unready_count += is_asked
        if self._unready_count > 2:  # behind the prompt they may be on their way
            self._give_up("they are missing")
        return False

    def _passes(self, committed: Sequence[int]) -> HeadPass:
        known = len(committed) - 1 - self.buffer.start
        return HeadPass(self.pairing, self.buffer, self._read_length, known)

    def _pairs(self, passes: HeadPass, committed: Sequence[int]) -> Delta:
        """The tokens of the pairs that are not read yet."""
        return Delta(passes.read_length, committed[self.buffer.start + 1 + passes.read_length :])

    async def _draw(self, step: ProposeStep, committed: list[int]) -> Proposal:
        passes = self._passes(committed)
        drafting = Drafting(len(committed), step.token_count, self.options, self.grammar)
        if self.grammar is not None:
            drafting.before = committed[self.options.prompt_length :]
        if self.options.sampling.penalizes:
            drafting.context = list(committed)
        passes.drafting = drafting
        goes_on = self.ahead is not None and step.ahead is not None
        passes.rows = [] if goes_on else None
        found, cost = await self._run(passes, committed)
        if found is None:
            return Proposal(len(committed))
        if goes_on and self.ahead is not None and found.token_ids:
            self.ahead.begin_behind(step, committed, found.token_ids, passes)
        return replace(found, cost=cost)

    async def _follow(self, step: ProposeStep, committed: list[int], proposed: list[int]) -> None:
        """Read what is being verified, all but its last token, and draft ahead from there."""
        assert self.ahead is not None
        passes = self._passes(committed)
        if proposed:
            passes.given = proposed[:-1]
            passes.rows = []
            await self._run(passes, committed)
            if self._fault or len(passes.rows) != len(proposed):
                return
        else:
            passes.rows = []
            delta = self._pairs(passes, committed[:-1])
            self._unchanged_length = passes.known_length - 1
            await self.engine.submit(Job(self.cached, delta, 0, passes))
            self._read_length = self._unchanged_length
        self.ahead.begin_behind(step, committed, proposed, passes)

    async def _run(self, passes: HeadPass, committed: Sequence[int]) -> tuple[Proposal | None, Any]:
        """Run passes behind the committed tokens. An error leaves the sequence without a draft."""
        job = Job(self.cached, self._pairs(passes, committed), 1, passes)
        self._unchanged_length = passes.known_length
        try:
            found = await self.engine.submit(job)
        except TandemError as error:
            self._give_up(str(error))
            return None, None
        self._read_length = self._unchanged_length
        return found, job.cost


@dataclass(eq=False)
class HeadProposer(EngineOwner[HeadEngine]):
    """Drafts with a head on a device of its own."""

    states: PairedStates
    fingerprint: str
    draft_top_k: int
    support_mass: float
    sampler: Sampler
    window: int | None = None
    grammars: Grammars | None = None
    vocabularies: None = None
    histories: dict[Any, OutcomeHistory] = field(default_factory=dict, init=False)

    @property
    def model_info(self) -> ModelInfo:
        return replace(
            self._engine.info,
            drafts_ahead=True,
            features_head=self.fingerprint,
            feature_window=self.window,
        )

    async def start(self) -> None:
        await super().start()
        if self.grammars is not None:
            await self.grammars.prepare()

    @asynccontextmanager
    async def sequence(self, options: DraftOptions) -> AsyncIterator[HeadSequence]:
        info = self.model_info
        grammar = None
        if options.grammar is not None and self.grammars is not None:
            grammar = await self.grammars.open(options.grammar, options.scope)
        spare = 0 if options.ahead is None else options.ahead.branch_count * (options.ahead.token_count + 1)
        length = options.max_length or info.max_length
        cached = await self._engine.open(length, spare, options.client)
        options = with_defaults(options, self.draft_top_k, self.support_mass)
        kind = options.row_kind, options.sampling.is_greedy, options.noise_is_unknown
        history = self.histories.setdefault(kind, OutcomeHistory())
        ahead = None
        if options.ahead is not None and not options.with_token_logits:
            engine: Any = self._engine
            ahead = HeadAhead(engine, cached, options, self.sampler, history, grammar)
        pairing = self.states.pairings[cached] = Pairing()
        source = self.states.tap
        sequence = HeadSequence(
            self._engine,
            cached,
            options,
            self.fingerprint,
            pairing,
            StateBuffer(source.target.dtype, source.state_size),
            info,
            source.state_size,
            ahead,
            grammar,
        )
        try:
            yield sequence
        finally:
            sequence.close()
            del self.states.pairings[cached]
            self._engine.release(cached)


def load_head_apart(
    settings: DraftSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> HeadProposer:
    """Load the head that the settings name."""
    folder = settings.checkpoint
    head = Eagle3Head(folder)
    assert settings.target_model is not None, "checked before"
    target = load_model(
        settings.target_model,
        device=settings.compute_device,
        dtype=settings.compute_dtype,
        threads=settings.threads,
    )
    head.load(target)
    module: Any = target.module
    module.get_decoder().layers = nn.ModuleList()  # the head needs the embedding alone
    fingerprint = weights_fingerprint(folder, find_weights(folder))
    states = PairedStates(ReceivedStates(target, head.state_size))
    model = as_model(head, states, folder.name)
    model = replace(model, info=replace(model.info, weights=Weights(1, fingerprint)))
    backends = choose_backends(model, settings.compile, settings.compile_cache)
    # A pair's keys depend on a token that its own sequence does not show.
    limits = replace(EngineSettings.of(settings), prefix_reuse=False)
    engine = _make_engine(backends, limits, on_step, on_failure)
    engine.shares_passes = settings.draft_shared_passes
    proposer = HeadProposer(
        engine,
        states,
        fingerprint,
        settings.draft_top_k,
        settings.draft_support_mass,
        backends.sampler,
        settings.draft_feature_window,
        Grammars.of(_tokenizer(settings.target_model), target.info),
    )
    proposer.fixed_because = "the head reads the states of one target's weights"
    return proposer


def _make_engine(
    backends: Backends,
    limits: EngineSettings,
    on_step: OnStep,
    on_failure: Callable[[], None] | None,
) -> HeadEngine:
    head: Any = partial(follow_and_draw, sampler=backends.sampler)
    return HeadEngine(backends, head, limits, on_step, on_failure=on_failure)


def _tokenizer(folder: Path) -> Path:
    return folder / TOKENIZER_FILE

"""A step of vLLM towards the drafts: its questions, patience and outcome; and the proposer that vLLM calls."""

from __future__ import annotations

import atexit
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.engine_vllm.contract import check_plugin, check_runner, lacking
from tandem.errors import ConfigurationError, TandemError
from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    AheadBudget,
    DraftOptions,
    Float32Array,
    IntArray,
    ModelInfo,
    Proposal,
    RowKind,
    SamplingParams,
)
from tandem.serving.scopes import CallerScopes, kinds_of
from tandem_coordinator.drafting import DraftAhead, DraftLimits, MovingAverage
from tandem_vllm.link import (
    NOTHING,
    AskedRow,
    Batch,
    DraftedRow,
    DraftLink,
    draft_pool,
    target_info,
    tokenizer_folder,
)
from tandem_vllm.metrics import Counts, Report, log_through
from tandem_vllm.settings import VllmSettings, read_settings

WORKER = "tandem_vllm.worker.TandemWorker"
"""The worker class for vLLM's `--worker-cls`."""

_DRAFT_TOP_K = 1024
_DRAFT_SUPPORT_MASS = 0.995
"""Wider than a coordinator's, which has a target send probabilities of as many tokens back: acceptance is then within a
point of a draft's that draws from all tokens (docs/measurements.md)."""
_MAX_BRANCHES = 16
"""Outcomes for each sequence where it is measured whether drafting ahead pays."""
_MAX_ROWS = 32
"""Branches of all sequences together: a step of so many rows costs a draft little more than one of one row."""


class Way(Enum):
    """The ways in which a step of vLLM goes about proposals."""

    ALONE = "alone"
    """It goes without any."""
    ASKED = "asked"
    """It asks for them, and waits."""
    AHEAD = "ahead"
    """The draft works ahead of it as well."""


_TRIAL_STEPS = 12
"""Steps in a trial of another way."""
_FIRST_PAUSE = 32
"""Steps before the first trial. Each trial that changes nothing doubles the pause before the next."""
_LONGEST_PAUSE = 8192
_MEMORY_STEPS = 96.0
"""Steps that the speed of each way averages over."""


class WaysOfDrafting:
    """Keeps to the way whose steps make the most tokens per second, and now and then tries another one.

    The time of a step cannot be predicted: vLLM makes it, not a service of ours."""

    def __init__(self, ways: Sequence[Way]) -> None:
        self.best = ways[0]
        self._made = {way: [0.0, 0.0] for way in ways}
        """Tokens and seconds of the steps in each way."""
        self._plan = self._plan_ways()

    def begin_step(self) -> Way:
        return next(self._plan)

    def end_step(self, way: Way, tokens: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / _MEMORY_STEPS
        made = self._made[way]
        made[:] = keep * made[0] + tokens, keep * made[1] + seconds

    def _plan_ways(self) -> Iterator[Way]:
        """The best way step after step, and between the pauses a trial of each of the others in turn."""
        turns = cycle(self._made)
        pause = _FIRST_PAUSE
        while True:
            yield from repeat(self.best, pause)
            yield from repeat(next(way for way in turns if way is not self.best), _TRIAL_STEPS)
            before = self.best
            self.best = max(self._made, key=self._speed)
            pause = _FIRST_PAUSE if self.best is not before else min(2 * pause, _LONGEST_PAUSE)

    def _speed(self, way: Way) -> float:
        tokens, seconds = self._made[way]
        return tokens / seconds if seconds else 0.0


class WaySwitch:
    """Drafts, and drafts ahead, where that makes more tokens per second, for each size of batch, by powers of two."""

    def __init__(self, option: DraftAhead, token_count: int) -> None:
        self._ways = {
            "off": (Way.ASKED, Way.ALONE),
            "auto": (Way.ASKED, Way.AHEAD, Way.ALONE),
        }.get(str(option), (Way.AHEAD, Way.ALONE))
        self._branches = option if isinstance(option, int) else 0
        self._token_count = min(token_count, MAX_AHEAD_TOKENS)
        self._by_size: dict[int, WaysOfDrafting] = {}
        self._counted: WaysOfDrafting | None = None
        """The ways that the step in progress counts for, if for any."""
        self.way = self._ways[0]

    @property
    def max_budget(self) -> AheadBudget | None:
        return self._budget(1) if Way.AHEAD in self._ways else None

    def begin_step(self, sequences: int) -> tuple[Way, AheadBudget | None]:
        """The way of the step that begins with so many sequences, and the budget of each for drafting ahead."""
        ways = self._by_size.setdefault(max(sequences, 1).bit_length(), WaysOfDrafting(self._ways))
        last = self.way
        self.way = ways.begin_step()
        # A step after a change of ways is half of either.
        self._counted = ways if self.way is last else None
        return self.way, self._budget(sequences) if self.way is Way.AHEAD else None

    def end_step(self, tokens: float, seconds: float) -> None:
        """Count the step that has ended: tokens of each sequence, and its time with the wait for proposals."""
        if self._counted is not None:
            self._counted.end_step(self.way, tokens, seconds)
            self._counted = None

    def _budget(self, sequences: int) -> AheadBudget:
        branches = self._branches or max(min(_MAX_BRANCHES, _MAX_ROWS // max(sequences, 1)), 1)
        return AheadBudget(branches, self._token_count)


MAX_SECONDS = 0.5
"""Maximum patience, whatever was learnt: a draft that hangs delays clients by this much at most."""
MIN_SECONDS = 0.001
"""Minimum patience: a continuation drafted ahead is there in less."""
_FIRST_PAUSE_STEPS = 8
"""Steps that do not wait after the first waits in vain; twice as many each further time."""
_MAX_PAUSE_STEPS = 1024
"""Some ten seconds of a small model."""
_VAIN_WAITS = 3
"""Waits in vain, one after the other, before such a pause."""
_PRIOR_ACCEPTANCE = 0.5
"""How often a token is taken to be accepted before anything was observed, and in the step after a pause."""


class Patience:
    """Decides how long a step of vLLM waits for its proposals, and whether it waits at all after waits in vain.

    The wait stops every sequence of the batch, so it must not take longer than what it saves: each accepted token
    spares a step. A wait of `accepted tokens x step time` gains nothing and loses nothing; that is the patience.
    """

    def __init__(self, token_count: int, fixed_seconds: float | None = None) -> None:
        """Begin without any measurement; with `fixed_seconds` the bound is that, and not learnt."""
        self._fixed_seconds = fixed_seconds
        self._step = MovingAverage()
        self._accepted = [MovingAverage() for _ in range(token_count)]
        """For each position of a proposal, how often its token was accepted."""
        for average in self._accepted:
            # Were the first proposal the average, its rejection would leave no patience to see another one
            average.add(_PRIOR_ACCEPTANCE)
        self._vain_steps = 0
        self._pause_steps = _FIRST_PAUSE_STEPS
        self._steps_left = 0

    @property
    def seconds(self) -> float:
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        step = self._step.value
        if step is None:
            return 0.05
        accepted = self.accepted_tokens
        if self._is_trial:
            # What was learnt may be wrong by now, and only a proposal that is waited for can tell
            accepted = max(accepted, _PRIOR_ACCEPTANCE * len(self._accepted))
        return min(max(accepted * step, MIN_SECONDS), MAX_SECONDS)

    @property
    def _is_trial(self) -> bool:
        """True in the first step that waits after a pause."""
        return self._vain_steps >= _VAIN_WAITS

    @property
    def accepted_tokens(self) -> float:
        return self.expected()[-1] - 1.0

    def expected(self) -> list[float]:
        """Expected tokens of a step with a proposal of 0, 1, ... tokens."""
        return list(accumulate((each.value or 0.0 for each in self._accepted), initial=1.0))

    @property
    def step_seconds(self) -> float | None:
        """Mean time of vLLM's own steps; None before the first."""
        return self._step.value

    def stepped(self, seconds: float) -> None:
        """Count a step of vLLM: from its proposals to the next ones."""
        usual = self._step.value
        # A much longer step read prompts, or waited for work
        self._step.add(seconds if usual is None else min(seconds, 4.0 * usual))

    def came_out(self, proposed: int, accepted: int) -> None:
        """Count a proposal that vLLM verified: its tokens, and how many of them were accepted."""
        for position, average in enumerate(self._accepted[:proposed]):
            average.add(position < accepted)

    def may_ask(self) -> bool:
        if self._steps_left:
            self._steps_left -= 1
            return False
        return True

    def waited(self, *, in_vain: bool) -> None:
        """Count a wait; in vain: it ended at its bound and nothing had come."""
        if not in_vain:
            if not self._is_trial:
                self._pause_steps = _FIRST_PAUSE_STEPS
            self._vain_steps = 0
            return
        self._vain_steps += 1
        # Not a single answer came in time
        if self._vain_steps >= _VAIN_WAITS:
            self._steps_left = self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, _MAX_PAUSE_STEPS)


logger = logging.getLogger("vllm.tandem")
"""A child of vLLM's own logger: same form, same destination."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of vLLM's batch."""

    name: str
    """vLLM's id of the request."""
    sampled: int
    """Number of tokens its last step sampled; 0 while it reads its prompt."""
    tokens_from: Callable[[int], Sequence[int]]
    """Returns its tokens from a position on."""


class StepDrafter:
    """Proposals for one step of vLLM after the other."""

    def __init__(self, settings: VllmSettings, target: ModelInfo, token_count: int, tokenizer: Path) -> None:
        self._settings = settings
        self._token_count = token_count
        self._max_length = target.max_length
        self.counts = Counts()
        self.patience = Patience(token_count, settings.draft_patience_seconds)
        self._known: dict[str, DraftedRow] = {}
        self._begun_count = 0
        self._switch = WaySwitch(settings.draft_ahead, token_count)
        self._limits = DraftLimits(token_count, target.vocabulary_size)
        self._scopes = CallerScopes(settings.service_credentials, kinds_of(settings.share_between_callers))
        self._options = DraftOptions(
            f"vllm-{uuid.uuid4().hex[:8]}",  # several vLLMs may share a draft, whose log names their sequences
            GREEDY,
            row_kind=RowKind.TOKEN,
            ahead=self._switch.max_budget,
            tokenizer_hash=target.tokenizer_hash,
            draft_top_k=_DRAFT_TOP_K,
            draft_support_mass=_DRAFT_SUPPORT_MASS,
            noise_is_unknown=True,
            vocabulary_size=target.vocabulary_size,
        )
        """Of a greedy request."""
        self.link = DraftLink(lambda: draft_pool(settings, target, tokenizer))
        self._report: Report | None = None
        self._asked_at: float | None = None
        self._answered_at: float | None = None

    def start(self) -> None:
        reason = self.link.start(self._settings.start_wait_seconds)
        if reason:
            logger.error("Tandem proposes nothing until a draft is ready: %s", reason)
        else:
            logger.info("Tandem drafts by %s", self._settings.draft_address)
        try:
            self._report = Report(self._settings, self.counts, lambda: self.link.open_sequences, logger)
        except TandemError as error:
            logger.error("Tandem serves no metrics: %s", error)  # noqa: TRY400 - a sentence is enough
        atexit.register(self.link.close)

    def close(self) -> None:
        atexit.unregister(self.link.close)
        self.link.close()

    def begin_step(self, scheduled: Any) -> None:
        """Let drafts read new prompts while vLLM does, and forget requests that have ended, as vLLM's `SchedulerOutput`
        says."""
        new = scheduled.scheduled_new_reqs
        # A name that comes again is a request that was preempted, or whose prompt has grown
        over = [*scheduled.finished_req_ids, *(data.req_id for data in new)]
        ended = [self._known.pop(name) for name in over if name in self._known]
        asked = [
            self._ask(
                self._begin_request(
                    data.req_id, sampling_of(data.sampling_params), salt_of(data.sampling_params)
                ),
                data.prefill_token_ids or data.prompt_token_ids or (),
                is_asking=self._switch.way is not Way.ALONE,
            )
            for data in new
        ]
        if ended or asked:
            self.link.ask(Batch(asked, ended=ended), 0.0)

    def propose(self, rows: Sequence[BatchRow]) -> list[Proposal]:
        began = time.monotonic()
        sequences = [self._known.get(row.name) or self._begin_request(row.name, GREEDY) for row in rows]
        self._learn(sequences, rows, began)
        way, budget = self._switch.begin_step(len(rows))
        is_asking = way is not Way.ALONE and self.patience.may_ask()
        seconds = self.patience.seconds if is_asking else 0.0
        asked = [
            self._ask(sequence, row.tokens_from(sequence.told), is_asking=seconds > 0.0 and row.sampled > 0)
            for sequence, row in zip(sequences, rows, strict=True)
        ]
        expected = self.patience.expected()
        step = self.patience.step_seconds
        tokens_per_second = expected[-1] / step if step else 0.0
        batch = Batch(asked, began + seconds, (), budget, expected, tokens_per_second)
        self.link.ask(batch, seconds)
        answers = list(batch.answers)
        is_late = seconds > 0.0 and batch.timed_out
        self._count(sequences, answers, time.monotonic() - began, is_late=is_late, was_asked=seconds > 0.0)
        return answers

    def _begin_request(self, name: str, sampling: SamplingParams, salt: str | None = None) -> DraftedRow:
        self._begun_count += 1
        options = replace(
            self._options,
            request_id=f"{self._options.request_id}-{self._begun_count}",
            sampling=sampling,
            row_kind=RowKind.TOKEN if sampling.is_greedy else RowKind.SUPPORT,
        )
        # Of vLLM's callers a worker knows nothing else.
        caller = "" if salt is None else "vllm"
        scopes = self._scopes.of(address=caller, salt=salt)
        known = self._known[name] = DraftedRow(options, scopes, self._limits, self.counts)
        return known

    def _ask(self, sequence: DraftedRow, new_tokens: Sequence[int], *, is_asking: bool) -> AskedRow:
        sequence.told += len(new_tokens)
        room = self._max_length - 1 - sequence.told
        return AskedRow(sequence, new_tokens, min(self._token_count, room) if is_asking else 0)

    def _learn(self, sequences: Sequence[DraftedRow], rows: Sequence[BatchRow], now: float) -> None:
        """Learn from the step that has ended: its time, and what became of its proposals."""
        sampled = [pair for pair in zip(sequences, rows, strict=True) if pair[1].sampled]
        continued = [(sequence, row.sampled) for sequence, row in sampled if sequence.has_sampled]
        for sequence, count in continued:
            if sequence.proposed:
                accepted = min(count - 1, sequence.proposed)
                self.patience.came_out(sequence.proposed, accepted)
                self.counts.verified_tokens += sequence.proposed
                self.counts.accepted_tokens += accepted
                sequence.proposed = 0
        for sequence, _ in sampled:
            sequence.has_sampled = True
        if not continued or self._answered_at is None or self._asked_at is None:
            return
        # A longer time between two calls was a pause without requests
        if now - self._answered_at < 30.0:
            self.patience.stepped(now - self._answered_at)
            mean = sum(count for _, count in continued) / len(continued)
            self._switch.end_step(mean, now - self._asked_at)

    def _count(
        self,
        sequences: Sequence[DraftedRow],
        answers: Sequence[Proposal],
        seconds: float,
        *,
        is_late: bool,
        was_asked: bool,
    ) -> None:
        counts = self.counts
        for sequence, answer in zip(sequences, answers, strict=True):
            sequence.proposed = len(answer)
        proposals = sum(len(answer) > 0 for answer in answers)
        counts.steps += 1
        counts.proposals += proposals
        counts.proposed_tokens += sum(map(len, answers))
        counts.wait_seconds += seconds
        counts.timed_out_steps += is_late
        counts.paused_steps += not was_asked
        if proposals or is_late:
            self.patience.waited(in_vain=is_late and not proposals)
        if self._report is not None:
            self._report.waited(seconds)
        now = time.monotonic()
        self._asked_at = now - seconds
        self._answered_at = now


def asks(parallel: Any) -> bool:
    """True for the `ParallelConfig` in the one process of a tensor-parallel group whose proposals vLLM reads.

    `MultiprocExecutor._get_output_rank` (vLLM 0.32) names that process: the first of the last pipeline stage, which is
    the only stage that makes proposers.
    """
    group = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    return bool(parallel.rank % group == 0)


GREEDY = SamplingParams(temperature=0.0)
_SAMPLING_EPS = 1e-5
"""vLLM's own: a lower temperature is greedy."""


def sampling_of(params: Any) -> SamplingParams:
    """How the draft of a request with these `SamplingParams` of vLLM's draws: as its target, with noise of its own.

    It draws nothing under structured output: vLLM's scheduler drops proposed tokens that the grammar forbids, and
    samples anew there, which is right for greedy proposals alone (where the distribution is certain, what remains of
    the target's after a rejection is the target's own).
    """
    if params is None or params.temperature < _SAMPLING_EPS or params.structured_outputs is not None:
        return GREEDY
    seed = random.getrandbits(63) if params.seed is None else params.seed & (1 << 63) - 1
    return SamplingParams(params.temperature, max(params.top_k, 0), params.top_p, params.min_p, seed)


def salt_of(params: Any) -> str | None:
    """The salt that a request gives in `vllm_xargs`; None without one. vLLM keeps its own `cache_salt` from workers."""
    given = (getattr(params, "extra_args", None) or {}).get("cache_salt")
    return given if isinstance(given, str) and given else None


def entries_of(proposals: Sequence[Proposal]) -> tuple[IntArray, IntArray, IntArray, Float32Array]:
    """Rows, tokens, ids and probabilities of a proposal for each row, as entries of a tensor of shape [rows, tokens,
    vocabulary] that is 0 elsewhere. A proposed token without a distribution is certain."""
    rows = [_NO_IDS]
    tokens = [_NO_IDS]
    ids = [_NO_IDS]
    probs = [np.zeros(0, np.float32)]
    for row, proposal in enumerate(proposals):
        for token, token_id in enumerate(proposal.token_ids):
            given = proposal.distributions[token] if token < len(proposal.distributions) else None
            ids.append(np.array([token_id]) if given is None else given.token_ids)
            probs.append(np.ones(1, np.float32) if given is None else given.probs.astype(np.float32))
            rows.append(np.full(len(ids[-1]), row))
            tokens.append(np.full(len(ids[-1]), token))
    return np.concatenate(rows), np.concatenate(tokens), np.concatenate(ids), np.concatenate(probs)


_NO_IDS = np.zeros(0, np.int64)

RUNNER_ATTRIBUTES = (
    "_draft_probs",
    "_draft_prob_req_ids",
    "input_batch.req_ids",
    "input_batch.vocab_size",
    "device",
)
"""Attributes of vLLM's model runner that the proposer reads and sets, beside the methods of `vllm_contract`."""


class Drafts:
    """The plug-in of one of vLLM's model runners: proposals in the one process of a group that asks for them,
    passed on to the others, each of which verifies and so needs the distributions.

    An error of ours must not end a request of vLLM's: it switches drafting off.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._settings = read_settings()
        self._config = vllm_config
        self._has_failed = False
        self.steps: StepDrafter | None = None
        """The part that asks the drafts; None in a process that does not, and before the start."""

    def start(self) -> None:
        parallel = self._config.parallel_config
        if not asks(parallel) or self.steps is not None:
            return
        log_through(logger)
        model_config = self._config.model_config
        target = target_info(model_config, parallel.tensor_parallel_size)
        count = int(self._config.speculative_config.num_speculative_tokens)
        self.steps = StepDrafter(self._settings, target, count, tokenizer_folder(model_config))
        self.steps.start()

    def begin_step(self, scheduled: Any) -> None:
        with self._switched_off_by_errors():
            if self.steps is not None and not self._has_failed:
                self.steps.begin_step(scheduled)

    def propose(self, row_count: int, rows: Callable[[], Sequence[BatchRow]]) -> list[Proposal]:
        proposals = [NOTHING] * row_count
        with self._switched_off_by_errors():
            if self.steps is not None and not self._has_failed:
                proposals = self.steps.propose(rows())
        if self._config.parallel_config.tensor_parallel_size == 1:
            return proposals
        from vllm.distributed.parallel_state import get_tp_group

        found: list[Proposal] = get_tp_group().broadcast_object(proposals, src=0)
        return found

    @contextmanager
    def _switched_off_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._has_failed = True
            logger.exception("drafting is switched off until the next start, because it failed")


class TandemProposer:
    """vLLM's proposer (`"method": "custom_class"`) over Tandem's draft services.

    Proposals are drawn by each request's own temperature, top-k, top-p and min-p, and vLLM's rejection sampler is given
    the distributions they were drawn from, so that its output stays that of the target. Whatever fails costs proposals,
    never a request.

    Source, of vLLM 0.32: `create_custom_proposer`, `GPUModelRunner.propose_draft_token_ids`,
    `GPUModelRunner._get_spec_decode_draft_probs`.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_plugin()
        self.drafts = Drafts(vllm_config)
        self._runner: Any = None

    def attach(self, runner: Any) -> None:
        """Take the model runner that calls this, which knows the requests and takes the distributions."""
        check_runner(lacking(runner, RUNNER_ATTRIBUTES))
        self._runner = runner

    def load_model(self, model: object = None) -> None:
        """Connect to the drafts. The model itself is not needed; vLLM calls this when it has loaded it."""
        if self._runner is None:
            raise ConfigurationError(
                f"start vLLM with --worker-cls {WORKER}, which lets Tandem's drafts be drawn"
            )
        self.drafts.start()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Tokens that may follow each row of the batch, at most `num_speculative_tokens`; none where none came in time.

        Args:
            sampled_token_ids: Tokens that each row's last step sampled; empty for a row that still reads its prompt.
            num_tokens_no_spec: Length of each row with what was sampled, int32, shape [max rows].
            token_ids_cpu: Tokens of each row, int32, shape [max rows, max length].
        """
        sampled = [len(each) for each in sampled_token_ids]
        proposals = self.drafts.propose(
            len(sampled), lambda: self._rows(sampled, num_tokens_no_spec, token_ids_cpu)
        )
        self._give_distributions(proposals)
        return [list(proposal.token_ids) for proposal in proposals]

    def _rows(self, sampled: Sequence[int], lengths: Any, token_ids: Any) -> list[BatchRow]:
        if not (
            isinstance(lengths, np.ndarray) and isinstance(token_ids, np.ndarray) and token_ids.ndim == 2
        ):
            raise TypeError(
                f"vLLM passed {type(lengths).__name__} and {type(token_ids).__name__}; they must be numpy arrays, the "
                "second one of two dimensions"
            )
        names = self._runner.input_batch.req_ids
        return [
            BatchRow(
                names[row],
                count,
                lambda start, row=row: token_ids[row, start : int(lengths[row])].tolist(),  # type: ignore[misc]
            )
            for row, count in enumerate(sampled)
        ]

    def _give_distributions(self, proposals: Sequence[Proposal]) -> None:
        """Let vLLM's next step verify by the distributions; without any it takes proposed tokens as certain."""
        if not any(proposal.distributions for proposal in proposals):
            return
        runner = self._runner
        longest = max(map(len, proposals))
        shape = len(proposals), longest, runner.input_batch.vocab_size
        probs = torch.zeros(shape, dtype=torch.float32, device=runner.device)
        *at, values = (torch.from_numpy(each).to(runner.device) for each in entries_of(proposals))
        probs[tuple(at)] = values
        runner._draft_probs = probs
        runner._draft_prob_req_ids = list(runner.input_batch.req_ids)

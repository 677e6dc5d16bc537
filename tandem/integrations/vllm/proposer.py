"""The proposer that vLLM calls: what each step asks the drafts, how long it waits for them, and what it learns."""

from __future__ import annotations

import atexit
import logging
import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coordinator.speculation.ahead import DraftAhead
from coordinator.stats.speculation import MovingAverage
from coordinator.transport.draft_client import DraftLimits
from tandem.errors import TandemError
from tandem.integrations.vllm.link import (
    AskedRow,
    Batch,
    DraftLink,
    draft_pool,
    target_info,
    tokenizer_folder,
)
from tandem.integrations.vllm.metrics import Counts, Report, log_through
from tandem.integrations.vllm.rows import IntArray, RecognisedRow, SequenceTable
from tandem.integrations.vllm.settings import VllmSettings, read_settings
from tandem.types import MAX_AHEAD_TOKENS, AheadBudget, DraftOptions, ModelInfo, SamplingParams
from tandem.vllm_contract import check_plugin

_MAX_BRANCHES = 8
"""Outcomes for each sequence where it is measured whether drafting ahead pays."""
_MAX_ROWS = 32
"""Branches of all sequences together: a step of so many rows costs a draft little more than one of one row."""


_TRIAL_STEPS = 12
"""Steps in a trial of the other way: drafting ahead, or not."""
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 8192
"""Steps before the first trial, and between later ones; each that changes nothing doubles the pause."""
_MEMORY_STEPS = 96.0
"""Steps that the speed of either way averages over."""


class WaysOfDrafting:
    """Compares the speed of steps that draft ahead with that of others, and now and then tries the other way.

    The time of a step cannot be predicted: vLLM makes it, not a service of ours."""

    def __init__(self) -> None:
        self.is_on = False
        self._made = {True: [0.0, 0.0], False: [0.0, 0.0]}
        """Tokens and seconds of the steps with drafting ahead, and without."""
        self._steps = 0
        self._pause = self._next_trial = _FIRST_PAUSE

    def begin_step(self) -> bool:
        """True if the step that begins is to draft ahead."""
        self._steps += 1
        if self._steps == self._next_trial + _TRIAL_STEPS:
            self._end_trial()
        return self.is_on != (self._steps >= self._next_trial)

    def end_step(self, was_on: bool, tokens: float, seconds: float) -> None:
        """Count a step."""
        keep = 1.0 - 1.0 / _MEMORY_STEPS
        made = self._made[was_on]
        made[:] = keep * made[0] + tokens, keep * made[1] + seconds

    def _end_trial(self) -> None:
        on, off = (tokens / seconds if seconds else 0.0 for tokens, seconds in self._made.values())
        is_better = on > off
        self._pause = _FIRST_PAUSE if is_better != self.is_on else min(2 * self._pause, _LONGEST_PAUSE)
        self.is_on = is_better
        self._next_trial = self._steps + self._pause


class AheadSwitch:
    """Drafts ahead where that makes more tokens per second, for each size of batch, by powers of two."""

    def __init__(self, option: DraftAhead, token_count: int) -> None:
        self._option = option
        self._token_count = min(token_count, MAX_AHEAD_TOKENS)
        self._ways: dict[int, WaysOfDrafting] = {}
        self._last: tuple[WaysOfDrafting, bool] | None = None
        """The step in progress, if it may be counted."""
        self._was_on = False

    @property
    def max_budget(self) -> AheadBudget | None:
        """The most that any step will grant; None for nothing."""
        if self._option == "off":
            return None
        branches = self._option if isinstance(self._option, int) else _MAX_BRANCHES
        return AheadBudget(branches, self._token_count)

    def begin_step(self, sequences: int) -> AheadBudget | None:
        """Budget of each of so many sequences in the step that begins; None for not at all."""
        if self._option == "off":
            return None
        if isinstance(self._option, int):
            return AheadBudget(self._option, self._token_count)
        ways = self._ways.setdefault(max(sequences, 1).bit_length(), WaysOfDrafting())
        is_on = ways.begin_step()
        # A step after a change of ways is half of either.
        self._last = (ways, is_on) if is_on == self._was_on else None
        self._was_on = is_on
        if not is_on:
            return None
        return AheadBudget(max(min(_MAX_BRANCHES, _MAX_ROWS // max(sequences, 1)), 1), self._token_count)

    def end_step(self, tokens: float, seconds: float) -> None:
        """Count the step that has ended: tokens of each sequence, and its time with the wait for proposals."""
        if self._last is not None:
            ways, is_on = self._last
            ways.end_step(is_on, tokens, seconds)
            self._last = None


MAX_SECONDS = 0.5
"""Maximum patience, whatever was learnt: a draft that hangs delays clients by this much at most."""
MIN_SECONDS = 0.001
"""Minimum patience: a continuation drafted ahead is there in less."""
_FIRST_PAUSE_STEPS, _MAX_PAUSE_STEPS = 8, 1024
"""Steps that do not wait after waits in vain: twice as many each time, up to some ten seconds of a small model."""


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
        self._vain_steps = 0
        self._pause_steps = _FIRST_PAUSE_STEPS
        self._steps_left = 0

    @property
    def seconds(self) -> float:
        """Seconds that the next step may wait."""
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        step = self._step.value
        if step is None:
            return 0.05
        return min(max(self.accepted_tokens * step, MIN_SECONDS), MAX_SECONDS)

    @property
    def accepted_tokens(self) -> float:
        """Mean number of tokens that vLLM accepts of a proposal."""
        return self.expected()[-1] - 1.0

    def expected(self) -> list[float]:
        """Expected tokens of a step with a proposal of 0, 1, ... tokens."""
        # Half, before any was observed
        shares = (0.5 if each.value is None else each.value for each in self._accepted)
        return list(accumulate(shares, initial=1.0))

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
        """True if the step that begins may ask and wait."""
        if self._steps_left:
            self._steps_left -= 1
            return False
        return True

    def waited(self, *, in_vain: bool) -> None:
        """Count a wait; in vain: it ended at its bound and nothing had come."""
        if not in_vain:
            self._vain_steps, self._pause_steps = 0, _FIRST_PAUSE_STEPS
            return
        self._vain_steps += 1
        # Not a single answer came in time
        if self._vain_steps >= 3:
            self._steps_left = self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, _MAX_PAUSE_STEPS)


logger = logging.getLogger("vllm.tandem")
"""A child of vLLM's own logger: same form, same destination."""


class StepDrafter:
    """Proposals for one step of vLLM after the other."""

    def __init__(self, settings: VllmSettings, target: ModelInfo, token_count: int, tokenizer: Path) -> None:
        self._settings = settings
        self._token_count = token_count
        self._max_length = target.max_length
        self.counts = Counts()
        self.patience = Patience(token_count, settings.draft_patience_seconds)
        self.table = SequenceTable()
        self._ahead = AheadSwitch(settings.draft_ahead, token_count)
        sampling, max_budget = SamplingParams(temperature=0.0), self._ahead.max_budget
        name = uuid.uuid4().hex[:8]  # several vLLMs may share a draft, whose log names their sequences
        self.link = DraftLink(
            lambda: draft_pool(settings, target, tokenizer),
            lambda key: DraftOptions(
                f"vllm-{name}-{key}", sampling, ahead=max_budget, tokenizer_hash=target.tokenizer_hash
            ),
            DraftLimits(token_count, target.vocabulary_size),
            self.counts,
        )
        self._report: Report | None = None
        self._asked_at: float | None = None
        self._answered_at: float | None = None

    def start(self) -> None:
        """Start to follow the drafts, and to report."""
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
        """End all sequences and the thread."""
        atexit.unregister(self.link.close)
        self.link.close()

    def propose(self, rows: Sequence[IntArray], sampled: Sequence[int]) -> list[list[int]]:
        """Proposals for a step.

        Args:
            rows: Tokens of each row, shape [length].
            sampled: How many of these its last step sampled; 0 for a row that still reads its prompt.
        """
        began = time.monotonic()
        recognised = self.table.recognise(rows)
        self._learn(recognised, sampled, began)
        budget = self._ahead.begin_step(len(rows))
        seconds = self.patience.seconds if self.patience.may_ask() else 0.0
        asked = [
            self._asked(row, count, is_asking=seconds > 0.0)
            for row, count in zip(recognised, sampled, strict=True)
        ]
        expected = self.patience.expected()
        batch = Batch(
            asked,
            began + seconds,
            [known.key for known in self.table.take_ended()],
            budget,
            expected,
            expected[-1] / step if (step := self.patience.step_seconds) else 0.0,
        )
        self.link.ask(batch, seconds)
        answers = [list(answer) for answer in batch.answers]
        is_late = seconds > 0.0 and batch.timed_out
        self._count(recognised, answers, time.monotonic() - began, is_late=is_late, was_asked=seconds > 0.0)
        return answers

    def _asked(self, row: RecognisedRow, sampled: int, *, is_asking: bool) -> AskedRow:
        reads_prompt = not sampled
        # A row that still reads its prompt: the draft may read it meanwhile.
        is_asked = row.is_new if reads_prompt else is_asking
        room = self._max_length - 1 - row.sequence.length
        count = min(self._token_count, room) if is_asked else 0
        return AskedRow(row.sequence.key, row.new_tokens, count, reads_prompt)

    def _learn(self, recognised: Sequence[RecognisedRow], sampled: Sequence[int], now: float) -> None:
        """Learn from the step that has ended: its time, and what became of its proposals."""
        continued = [
            (row, count) for row, count in zip(recognised, sampled, strict=True) if count and not row.is_new
        ]
        for row, count in continued:
            if row.sequence.proposed:
                accepted = min(count - 1, row.sequence.proposed)
                self.patience.came_out(row.sequence.proposed, accepted)
                self.counts.verified_tokens += row.sequence.proposed
                self.counts.accepted_tokens += accepted
                row.sequence.proposed = 0
        if not continued or self._answered_at is None or self._asked_at is None:
            return
        # A longer time between two calls was a pause without requests
        if now - self._answered_at < 30.0:
            self.patience.stepped(now - self._answered_at)
            mean = sum(count for _, count in continued) / len(continued)
            self._ahead.end_step(mean, now - self._asked_at)

    def _count(
        self,
        recognised: Sequence[RecognisedRow],
        answers: Sequence[Sequence[int]],
        seconds: float,
        *,
        is_late: bool,
        was_asked: bool,
    ) -> None:
        counts = self.counts
        proposals = 0
        for row, answer in zip(recognised, answers, strict=True):
            row.sequence.proposed = len(answer)
            proposals += bool(answer)
            counts.proposed_tokens += len(answer)
        counts.steps += 1
        counts.proposals += proposals
        counts.wait_seconds += seconds
        counts.timed_out_steps += is_late
        counts.paused_steps += not was_asked
        if proposals or is_late:
            self.patience.waited(in_vain=is_late and not proposals)
        if self._report is not None:
            self._report.waited(seconds)
        now = time.monotonic()
        self._asked_at, self._answered_at = now - seconds, now


class ParallelConfig(Protocol):
    """The part of vLLM's `ParallelConfig` that says which process this is."""

    rank: int
    tensor_parallel_size: int


def asks(parallel: ParallelConfig) -> bool:
    """True in the one process of a tensor-parallel group whose proposals vLLM reads: its first.

    `MultiprocExecutor._get_output_rank` (vLLM 0.32) names that process: the first of the last pipeline stage, which is
    the only stage that makes proposers.
    """
    group = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    return parallel.rank % group == 0


class TandemProposer:
    """vLLM's proposer (`"method": "custom_class"`) over Tandem's draft services.

    Proposals are greedy, which vLLM takes as one-hot distributions; its output stays that of the target at any
    temperature. Whatever fails costs proposals, never a request.

    Source: `create_custom_proposer` and `GPUModelRunner.propose_draft_token_ids` of vLLM 0.32.
    """

    def __init__(self, vllm_config: Any) -> None:
        """
        Args:
            vllm_config: vLLM's `VllmConfig`.

        Raises:
            ConfigurationError: this vLLM calls proposers differently, or an option is wrong.
        """
        check_plugin()
        self._settings: VllmSettings = read_settings()
        speculative = vllm_config.speculative_config
        self._token_count = int(speculative.num_speculative_tokens)
        self._is_asking = asks(vllm_config.parallel_config)
        self._vllm_config = vllm_config
        self._steps: StepDrafter | None = None
        self._has_failed = False

    @property
    def steps(self) -> StepDrafter | None:
        """The part that asks the drafts; None in a process that does not, and before the start."""
        return self._steps

    def load_model(self, model: object = None) -> None:
        """Connect to the drafts. The model itself is not needed; vLLM calls this when it has loaded it."""
        if not self._is_asking or self._steps is not None:
            return
        log_through(logger)
        parallel = self._vllm_config.parallel_config
        model_config = self._vllm_config.model_config
        target = target_info(model_config, parallel.tensor_parallel_size)
        tokenizer = tokenizer_folder(model_config)
        self._steps = StepDrafter(self._settings, target, self._token_count, tokenizer)
        self._steps.start()

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
            slot_mappings: Not used.
        """
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._is_asking or self._has_failed:
            return nothing
        try:
            self.load_model()
            assert self._steps is not None, "it was made just now"
            rows = _rows(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            return self._steps.propose(rows, [len(sampled) for sampled in sampled_token_ids])
        except Exception:  # an error of ours must not end a request of vLLM's
            self._has_failed = True
            logger.exception("drafting is switched off until the next start, because it failed")
            return nothing


def _rows(sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any) -> list[IntArray]:
    """The tokens of each row of vLLM's batch.

    Raises:
        TypeError: these are not the arrays of the release that the plug-in was made for.
    """
    if not (isinstance(lengths, np.ndarray) and isinstance(token_ids, np.ndarray) and token_ids.ndim == 2):
        raise TypeError(
            f"vLLM passed {type(lengths).__name__} and {type(token_ids).__name__}; they must be numpy arrays, the "
            "second one of two dimensions"
        )
    return [token_ids[row, : int(lengths[row])] for row in range(len(sampled))]

"""Proposals for one step of vLLM after the other: what is asked, how long it is waited for, what is learnt."""

from __future__ import annotations

import atexit
import logging
import time
import uuid
from collections.abc import Sequence

from coordinator.transport.proposal_checks import DraftLimits
from tandem.errors import TandemError
from tandem.integrations.vllm.ahead import AheadSwitch
from tandem.integrations.vllm.counts import Counts
from tandem.integrations.vllm.drafted_row import Ask
from tandem.integrations.vllm.drafts import draft_pool
from tandem.integrations.vllm.link import AskedRow, Batch, DraftLink
from tandem.integrations.vllm.metrics import Report
from tandem.integrations.vllm.patience import Patience
from tandem.integrations.vllm.rows import IntArray, RecognisedRow, SequenceTable
from tandem.integrations.vllm.settings import VllmSettings
from tandem.types import AheadBudget, DraftOptions, ModelInfo, SamplingParams

logger = logging.getLogger("vllm.tandem")
"""A child of vLLM's own logger: same form, same destination."""

_LONGEST_STEP_SECONDS = 30.0
"""A longer time between two calls was a pause without requests."""


class StepDrafter:
    """Proposals for one step of vLLM after the other."""

    def __init__(self, settings: VllmSettings, target: ModelInfo, token_count: int) -> None:
        """
        Args:
            settings: The plug-in's.
            target: vLLM's model.
            token_count: Tokens of a proposal.
        """
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
            lambda: draft_pool(settings, target),
            lambda key: DraftOptions(f"vllm-{name}-{key}", sampling, ahead=max_budget),
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
        batch = self._batch(recognised, sampled, began + seconds, budget, is_asking=seconds > 0.0)
        self.link.ask(batch, seconds)
        answers = [list(answer) for answer in batch.answers]
        is_late = seconds > 0.0 and batch.timed_out
        self._count(recognised, answers, time.monotonic() - began, is_late=is_late, was_asked=seconds > 0.0)
        return answers

    def _batch(
        self,
        recognised: Sequence[RecognisedRow],
        sampled: Sequence[int],
        until: float,
        budget: AheadBudget | None,
        *,
        is_asking: bool,
    ) -> Batch:
        expected, speed = self._expected(), self._tokens_per_second()
        asked = []
        for row, count in zip(recognised, sampled, strict=True):
            room = self._max_length - 1 - row.sequence.length
            # A row that still reads its prompt: the draft may read it meanwhile.
            tokens = min(self._token_count, room) if (is_asking if count else row.is_new) else 0
            ask = Ask(tokens, until if count else 0.0, budget, expected, speed)
            asked.append(AskedRow(row.sequence.key, row.new_tokens, ask))
        return Batch(asked, [known.key for known in self.table.take_ended()])

    def _learn(self, recognised: Sequence[RecognisedRow], sampled: Sequence[int], now: float) -> None:
        """Learn from the step that has ended: its time, and what became of its proposals."""
        continued = [
            (row, count) for row, count in zip(recognised, sampled, strict=True) if count and not row.is_new
        ]
        for row, count in continued:
            if row.sequence.proposed:
                accepted = min(count - 1, row.sequence.proposed)
                self.patience.came_out(accepted)
                self.counts.verified_tokens += row.sequence.proposed
                self.counts.accepted_tokens += accepted
                row.sequence.proposed = 0
        if not continued or self._answered_at is None or self._asked_at is None:
            return
        if now - self._answered_at < _LONGEST_STEP_SECONDS:
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

    def _expected(self) -> list[float]:
        """Expected tokens of a step with a proposal of 0, 1, ... tokens, at one rate for every position.

        Empty where nothing is drafted ahead: only a continuation that is still being drafted is weighed by it.
        """
        if self._ahead.max_budget is None:
            return []
        accepted = min(self.patience.accepted_tokens / self._token_count, 1.0)
        rate = _rate(accepted, self._token_count)
        expected, chance = [1.0], 1.0
        for _ in range(self._token_count):
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected

    def _tokens_per_second(self) -> float:
        step = self.patience.step_seconds
        return 0.0 if not step else (1.0 + self.patience.accepted_tokens) / step


def _rate(accepted_share: float, token_count: int) -> float:
    """The chance of each token, given the ones before it, that gives this mean share of accepted tokens."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        mean = sum(middle**position for position in range(1, token_count + 1)) / token_count
        low, high = (middle, high) if mean < accepted_share else (low, middle)
    return low

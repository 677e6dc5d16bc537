"""The plug-in's counts, as metrics for Prometheus and OTLP and as a line in vLLM's own log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.telemetry.logs import escape, fields_of
from tandem.telemetry.metrics import Read
from tandem.telemetry.settings import TelemetryOptions, is_observed

if TYPE_CHECKING:
    from tandem.telemetry.process import Telemetry

WAIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds. The first three are a continuation drafted ahead, which costs no round trip."""


def _total(meaning: str) -> Any:
    return field(default=0, metadata={"meaning": meaning})


@dataclass(slots=True)
class Counts:
    """Totals since the start. Each field has one thread that writes it."""

    steps: int = _total("Steps of vLLM that asked for proposals.")
    timed_out_steps: int = _total("Steps that waited until their patience was over.")
    paused_steps: int = _total(
        "Steps that asked nothing: the last waits were in vain, or going without makes more tokens."
    )
    proposals: int = _total("Proposals handed to vLLM.")
    proposed_tokens: int = _total("Tokens of these.")
    verified_tokens: int = _total(
        "Proposed tokens whose verification was seen, not those of a sequence's last."
    )
    accepted_tokens: int = _total("Tokens of these that vLLM accepted.")
    answered_rows: int = _total("Proposals that came by a question and its answer.")
    late_rows: int = _total("Sequences that a step went on without, because their draft was still at work.")
    awaited_outcomes: int = _total("Outcomes that a draft was to work ahead of.")
    hits: int = _total("Of these, those that it had drafted for.")
    lost_drafts: int = _total("Times that a draft failed a sequence.")
    wait_seconds: float = 0.0
    """Time that steps waited for proposals, in all."""

    def since(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def line(self) -> str:
        return (
            f"Tandem drafts: {self.proposals} proposals of {_mean(self.proposed_tokens, self.proposals):.2f} tokens, "
            f"accepted {_share(self.accepted_tokens, self.verified_tokens)}, drafted ahead "
            f"{_share(self.hits, self.awaited_outcomes)} of {self.awaited_outcomes}, wait "
            f"{1000 * _mean(self.wait_seconds, self.steps):.2f} ms a step, timeouts {self.timed_out_steps} of "
            f"{self.steps} steps, late {self.late_rows}, lost drafts {self.lost_drafts}"
        )


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


def _share(part: int, whole: int) -> str:
    return f"{100 * _mean(part, whole):.1f}%"


LOG_SECONDS = 10.0
"""Interval of the log line, as of vLLM's own."""
_PREFIX = "tandem_vllm_"


def register(registry: CollectorRegistry, counts: Counts, open_sequences: Callable[[], int]) -> Histogram:
    """Register the counts, as they are when somebody asks, and the histogram of waits, which is returned."""

    def read() -> Iterator[Metric]:
        for each in fields(counts):
            if meaning := each.metadata.get("meaning"):
                yield CounterMetricFamily(_PREFIX + each.name, meaning, value=getattr(counts, each.name))
        words = "Sequences kept for drafts now."
        yield GaugeMetricFamily(_PREFIX + "sequences", words, value=open_sequences())

    registry.register(Read(read))
    words = "Time that a step of vLLM waited for its proposals."
    return Histogram(_PREFIX + "wait_seconds", words, registry=registry, buckets=WAIT_BUCKETS)


class Report:
    """Serves metrics where an option says so, and logs a line every ten seconds in which vLLM made steps."""

    def __init__(
        self,
        options: TelemetryOptions,
        counts: Counts,
        open_sequences: Callable[[], int],
        logger: logging.Logger,
    ) -> None:
        self._counts = counts
        self._before = replace(counts)
        self._logger = logger
        self._next_line = time.monotonic() + LOG_SECONDS
        self._waits: Histogram | None = None
        self._telemetry: Telemetry | None = None
        if is_observed(options):
            from tandem.telemetry.process import Telemetry

            self._telemetry = telemetry = Telemetry(options, "vllm")
            self._waits = register(telemetry.registry, counts, open_sequences)
            telemetry.start()

    @property
    def prometheus_port(self) -> int | None:
        return None if self._telemetry is None else self._telemetry.prometheus_port

    def waited(self, seconds: float) -> None:
        """A step waited so long. Logs the line when it is due."""
        if self._waits is not None:
            self._waits.observe(seconds)
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LOG_SECONDS
            self._logger.info(self._counts.since(self._before).line())
            self._before = replace(self._counts)


class _Forwarding(logging.Handler):
    """Writes our loggers' events, fields included, as lines of vLLM's logger."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.INFO)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        tail = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        self._logger.log(record.levelno, "%s", escape(record.getMessage() + tail), exc_info=record.exc_info)


def log_through(logger: logging.Logger) -> None:
    """Let what the shared code reports (replicas found, lost, unfit) appear in vLLM's log."""
    for name in ("tandem", "tandem_coordinator"):
        ours = logging.getLogger(name)
        ours.handlers[:] = [_Forwarding(logger)]
        ours.setLevel(logging.INFO)
        ours.propagate = False

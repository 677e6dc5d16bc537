"""Counts of the plug-in's work, for metrics and the log line."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

WAIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds. The first three are a continuation drafted ahead, which costs no round trip."""


@dataclass(slots=True)
class Counts:
    """Totals since the start. Each field has one thread that writes it."""

    steps: int = 0
    """Steps of vLLM."""
    timed_out_steps: int = 0
    """Steps that waited until their patience was over."""
    paused_steps: int = 0
    """Steps that asked nothing because the last waits were in vain."""
    wait_seconds: float = 0.0
    """Time that steps waited for proposals, in all."""
    proposals: int = 0
    proposed_tokens: int = 0
    verified_tokens: int = 0
    """Proposed tokens whose verification was seen; that of a sequence's last proposal is not."""
    accepted_tokens: int = 0
    """Of these."""
    answered_rows: int = 0
    """Proposals that came by a question and its answer."""
    late_rows: int = 0
    """Sequences that a step went on without, because their draft was still at work."""
    awaited_outcomes: int = 0
    """Steps of a sequence that the draft was to work ahead of."""
    hits: int = 0
    """Of these, those that ended in an outcome that it had drafted for."""
    lost_drafts: int = 0
    """Times that a sequence's draft failed it."""
    started_sequences: int = 0
    ended_sequences: int = 0

    def since(self, before: Counts) -> Counts:
        """The counts since a copy of these."""
        return Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def copy(self) -> Counts:
        """These at this moment."""
        return replace(self)

    def line(self) -> str:
        """One line for a log."""
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

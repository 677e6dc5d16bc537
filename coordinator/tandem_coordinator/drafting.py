"""The library for whoever drafts from draft services without a coordinator, such as the plug-in for vLLM: pools and
health of the drafts, streams to them, and the choice of a draft for each sequence.

All else of the coordinator is its own, and may change without a word.
"""

from __future__ import annotations

from tandem_coordinator.controller import DraftAhead, tokens_after_hit
from tandem_coordinator.outcomes import Coming, Idle, Miss
from tandem_coordinator.replicas.compatibility import MODEL_RULES, Deployment, needs_mapping
from tandem_coordinator.replicas.pool import Member, Pool
from tandem_coordinator.rounds.placement import DraftPlacement, OpenSequence
from tandem_coordinator.settings.coordinator import (
    Addresses,
    ServiceAccessOptions,
    SharingOptions,
    encryption_rule,
)
from tandem_coordinator.stats.speculation import MovingAverage
from tandem_coordinator.transport.draft_client import DraftClient, DraftLimits, DraftSequence

__all__ = [
    "MODEL_RULES",
    "Addresses",
    "Coming",
    "Deployment",
    "DraftAhead",
    "DraftClient",
    "DraftLimits",
    "DraftPlacement",
    "DraftSequence",
    "Idle",
    "Member",
    "Miss",
    "MovingAverage",
    "OpenSequence",
    "Pool",
    "ServiceAccessOptions",
    "SharingOptions",
    "encryption_rule",
    "needs_mapping",
    "tokens_after_hit",
]

"""The library for whoever drafts from draft services without a coordinator, such as the plug-in for vLLM: pools and
health of the drafts, streams to them, and the choice of a draft for each sequence.

All else of the coordinator is its own, and may change without a word.
"""

from __future__ import annotations

from tandem_coordinator.controller import DraftAhead, Unfinished, tokens_after_hit
from tandem_coordinator.failover.placement import DraftPlacement, OpenSequence
from tandem_coordinator.replicas.compatibility import MODEL_RULES, Deployment, needs_mapping
from tandem_coordinator.replicas.pool import Member, Pool
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
    "Deployment",
    "DraftAhead",
    "DraftClient",
    "DraftLimits",
    "DraftPlacement",
    "DraftSequence",
    "Member",
    "MovingAverage",
    "OpenSequence",
    "Pool",
    "ServiceAccessOptions",
    "SharingOptions",
    "Unfinished",
    "encryption_rule",
    "needs_mapping",
    "tokens_after_hit",
]

"""Steps of branches by the CPU kernels, replayed from the same execution plans as other steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from tandem.engine.backends.branches import BranchPacking, EagerBranches, SequenceBranches, clear_room
from tandem.engine.backends.cpu_native.plans.planned_steps import PlannedSteps
from tandem.engine.backends.trial import Reference
from tandem.engine.kv_cache.arena import KvArena

logger = logging.getLogger(__name__)


class NativeBranches:
    """See `BranchRunner`. The first step is run both ways, and the kernels are trusted if they agree."""

    def __init__(
        self, plans: PlannedSteps, eager: EagerBranches, arena: KvArena, reference: Reference
    ) -> None:
        self._plans = plans
        self._eager = eager
        self._arena = arena
        self._reference = reference
        self._is_trusted: bool | None = None
        """None before the trial, which takes a step with tokens of its own behind the trunk."""

    def run(self, parts: SequenceOf[SequenceBranches]) -> Tensor:
        """See `BranchRunner`."""
        if self._is_trusted is False:
            return self._eager.run(parts)
        for part in parts:
            clear_room(self._arena, part)
        packing = BranchPacking(parts)
        logits = self._plans.replay(packing, range(packing.token_count))
        if logits is None:
            return self._eager.run(parts)
        if self._is_trusted is None and any(part.step.depth for part in parts):
            return self._tried(logits, self._eager.run(parts))
        return logits

    def _tried(self, logits: Tensor, expected: Tensor) -> Tensor:
        error = self._reference.in_spreads(logits, expected)
        self._is_trusted = error <= self._reference.limit
        if not self._is_trusted:
            logger.warning("branches run by the model's modules", extra={"error_in_spreads": round(error, 3)})
        return expected

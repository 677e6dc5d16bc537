"""The step backend of the CPU kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from tandem.engine.backends.cpu_native.attention import NativeAttention, NativeLayout
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.cpu_native.plans.planned_steps import PlannedSteps
from tandem.engine.backends.cpu_native.plans.trace import Trace, TraceError
from tandem.engine.backends.hidden_states.head_model import HeadModel
from tandem.engine.backends.packing import run_modules
from tandem.engine.backends.trial import Reference
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import LoadedModel

logger = logging.getLogger(__name__)


class ModuleSteps:
    """Steps by a model's modules whose linear layers are packed, with one attention call for each layer."""

    def __init__(self, model: LoadedModel, arena: KvArena, kernels: Kernels) -> None:
        self._model = model
        self.attention = NativeAttention(kernels, arena, model.layers)

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """See `StepBackend`."""
        return ()

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`."""
        return limit

    def accepts(self, segments: SequenceOf[Segment]) -> bool:
        """True if no segment is so wide that torch's attention is faster."""
        return self.attention.suits(segments)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`."""
        layout = NativeLayout(segments, self.attention)
        return run_modules(self._model.module, layout, rows, self._model.device)


class CpuNativeBackend(ModuleSteps):
    """The same, from execution plans where the model's pass can be compiled to them."""

    def __init__(
        self, model: LoadedModel, arena: KvArena, kernels: Kernels, reference: Reference, trace: Trace | None
    ) -> None:
        super().__init__(model, arena, kernels)
        self.plans: PlannedSteps | None = None
        """None where the pass is not the same list of operations for all tokens."""
        if trace is None:
            return
        head = model.module if isinstance(model.module, HeadModel) else None
        try:
            self.plans = PlannedSteps(trace.graph(), self.attention, reference, super().run, head)
        except TraceError as error:
            logger.info("steps run by the model's modules", extra={"reason": str(error)})

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """See `StepBackend`."""
        return () if self.plans is None else self.plans.warm_up_steps

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`."""
        return limit if self.plans is None else self.plans.prompt_tokens(limit)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`."""
        return super().run(segments, rows) if self.plans is None else self.plans.run(segments, rows)

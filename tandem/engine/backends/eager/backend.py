"""Steps by the model's own modules, with torch's linear layers and torch's attention."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from tandem.engine.backends.eager.layout import StepLayout
from tandem.engine.backends.eager.serial import SerialBackend
from tandem.engine.backends.interface import StepBackend
from tandem.engine.backends.packing import run_modules
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import LoadedModel

SMALL_STEP_TOKENS = 8
"""A sequence alone asks for steps of up to this many tokens."""


class EagerBackend:
    """Runs any step of a model whose attention can be packed."""

    def __init__(self, model: LoadedModel, arena: KvArena) -> None:
        self._model = model
        self._arena = arena

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """See `StepBackend`. torch sets up buffers for each small size."""
        return [(size,) for size in range(1, SMALL_STEP_TOKENS + 1)]

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`."""
        return limit

    def accepts(self, segments: SequenceOf[Segment]) -> bool:
        """Any step."""
        return True

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`."""
        model = self._model
        layout = StepLayout(segments, self._arena, model.layers, model.dtype, model.device)
        return run_modules(model.module, layout, layout.packed_rows(segments, rows), model.device)


def eager_backend(model: LoadedModel, arena: KvArena) -> StepBackend:
    """The backend that runs any step of this model."""
    return EagerBackend(model, arena) if model.is_packed else SerialBackend(model, arena)

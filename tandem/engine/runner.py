"""Runs one step: a forward pass over packed tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from tandem.engine.attention import STEP_ARGUMENT
from tandem.engine.buckets import Bucket
from tandem.engine.cache import KvArena
from tandem.engine.layout import Packing, StepLayout
from tandem.engine.model import LoadedModel
from tandem.engine.native.attention import NativeAttention, NativeLayout
from tandem.engine.native.steps import TapePacking, TapeSteps, tape_steps
from tandem.engine.recorded import RecordedPacking, RecordedSteps
from tandem.engine.recording import Recorder
from tandem.engine.segment import Segment
from tandem.engine.serial import SerialForward

SMALL_STEP_TOKENS = 8
"""Steps of up to so many tokens are what a sequence alone asks for."""


class StepRunner:
    """Owns the arena and calls the model, or plays what was recorded of it."""

    def __init__(self, model: LoadedModel, total_tokens: int) -> None:
        self._module: Any = model.module
        self.model = model
        self.arena = KvArena(model.layers, total_tokens, model.dtype, model.device)
        self._serial = None if model.is_packed else SerialForward(self._module, self.arena, model.device)
        self._recorded: RecordedSteps | None = None
        self._native = (
            None if model.kernels is None else NativeAttention(model.kernels, self.arena, model.layers)
        )
        self._tapes: TapeSteps | None = None
        if self._native is not None and model.trace is not None:
            self._tapes = tape_steps(model.trace, self._native, self._run_modules)

    def record(self, buckets: SequenceOf[Bucket], recorder: Recorder) -> None:
        """Records the step for these shapes; called before the first step. Other shapes run eagerly."""
        if self.model.is_packed:
            self._recorded = RecordedSteps(self.model, self.arena, buckets, recorder)

    @property
    def warm_up_sizes(self) -> SequenceOf[int]:
        """Tokens of steps for which something is set up when they are first run, fewest first."""
        return range(1, SMALL_STEP_TOKENS + 1) if self._tapes is None else self._tapes.warm_up_sizes

    def prompt_tokens(self, most: int) -> int:
        """How many tokens of long prompts a step should take, up to `most`. What a tape holds comes faster in parts
        than the same in one step by the model's modules."""
        return most if self._tapes is None else self._tapes.prompt_tokens(most)

    def pack(self, segments: list[Segment]) -> Packing:
        """Decides the order in which the segments' tokens are packed."""
        if self._serial is not None:
            return Packing(segments)
        if self._recorded is not None and (step := self._recorded.fitting(segments)) is not None:
            return RecordedPacking(segments, step)
        if self._native is not None and self._native.suits(segments):
            packing = None if self._tapes is None else self._tapes.pack(segments)
            return packing or NativeLayout(segments, self._native)
        model = self.model
        return StepLayout(segments, self.arena, model.layers, model.dtype, model.device)

    def run(self, packing: Packing, rows: list[int]) -> Tensor:
        """One step. The segments' keys and values are then in the arena.

        Args:
            packing: what `pack` returned.
            rows: indices of the packed tokens whose logits are wanted.

        Returns:
            Logits, [len(rows), vocabulary_size] in the model's dtype.
        """
        if self._serial is not None:
            return self._serial(packing, rows)
        if isinstance(packing, RecordedPacking | TapePacking):
            return packing.run(rows)
        return self._run_modules(packing, rows)

    def _run_modules(self, packing: Packing, rows: list[int]) -> Tensor:
        """The step by the model's own modules."""
        device = self.model.device
        packed = torch.tensor(
            (packing.token_ids(), packing.positions()), device=device
        )  # one copy to the device
        output = self._module(
            input_ids=packed[:1],
            position_ids=packed[1:],
            logits_to_keep=_rows_to_keep(rows, packing.token_count, device),
            use_cache=False,
            **{STEP_ARGUMENT: packing},
        )
        logits: Tensor = output.logits[0]
        return logits


def _rows_to_keep(rows: list[int], token_count: int, device: torch.device) -> Tensor | int:
    """The rows in the form that transformers takes; 0 stands for all of them, the usual case, and saves a gather."""
    return 0 if len(rows) == token_count else torch.tensor(rows, dtype=torch.long, device=device)

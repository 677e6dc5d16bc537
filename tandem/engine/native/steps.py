"""Steps that are played from tapes: which there are, and that each is compared with the model before it is trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from torch.fx import GraphModule

from tandem.engine.layout import Packing
from tandem.engine.native.attention import WIDEST_SEGMENT, NativeAttention, NativeLayout
from tandem.engine.native.tape import Tape
from tandem.engine.native.trace import Trace, TraceError
from tandem.engine.segment import Segment

logger = logging.getLogger(__name__)

Plain = Callable[[Packing, list[int]], Tensor]
"""Runs a step by the model's own modules: the wanted rows of the logits."""

TOKEN_COUNTS = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    56,
    64,
    72,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
)
"""Sizes of tapes. Fewer tokens are padded, which costs little where reading the weights is what takes the time."""

_MANY_TOKENS = 8
"""Where a tape computes the logits of all its tokens, the plain step is better for more than so many of which few are
wanted."""

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
"""By how much of the largest logit the two may differ. The operations are the same, but padding may change in which
order a kernel adds up."""


def tape_steps(trace: Trace, attention: NativeAttention, plain: Plain) -> TapeSteps | None:
    """Tapes of a model; None, with a log line, where its pass is not the same list of operations for all tokens."""
    try:
        return TapeSteps(trace.graph(), attention, plain)
    except TraceError as error:
        logger.info("steps run by the model's modules", extra={"reason": str(error)})
        return None


class TapeSteps:
    """Makes the tape of a size when it is first wanted, some ten milliseconds."""

    def __init__(self, graph: GraphModule, attention: NativeAttention, plain: Plain) -> None:
        self._graph = graph
        self._attention = attention
        self._plain = plain
        self._tapes: dict[int, Tape] = {}
        self._is_trusted = True

    @property
    def warm_up_sizes(self) -> SequenceOf[int]:
        """See `StepRunner.warm_up_sizes`; those of one sequence."""
        return [size for size in TOKEN_COUNTS if size <= WIDEST_SEGMENT]

    def prompt_tokens(self, most: int) -> int:
        """See `StepRunner.prompt_tokens`."""
        return min(most, WIDEST_SEGMENT) if self._is_trusted and self._computes_wanted_rows_only else most

    def pack(self, segments: SequenceOf[Segment]) -> Packing | None:
        """The segments as a tape runs them; None when there is none for them."""
        count = sum(segment.token_count for segment in segments)
        if not self._is_trusted or count > TOKEN_COUNTS[-1]:
            return None
        return TapePacking(segments, self)

    def run(self, packing: Packing, rows: list[int]) -> Tensor:
        """The step; see `StepRunner.run`."""
        count = packing.token_count
        if count > _MANY_TOKENS and 2 * len(rows) < count and not self._computes_wanted_rows_only:
            return self._run_plainly(packing, rows)
        size = next(size for size in TOKEN_COUNTS if size >= count)
        if size in self._tapes:
            return self._tapes[size].play(packing, rows)
        return self._try_out(size, packing, rows)

    @property
    def _computes_wanted_rows_only(self) -> bool:
        return any(tape.computes_wanted_rows_only for tape in self._tapes.values())

    def _run_plainly(self, packing: Packing, rows: list[int]) -> Tensor:
        return self._plain(NativeLayout(packing.segments, self._attention), rows)

    def _try_out(self, size: int, packing: Packing, rows: list[int]) -> Tensor:
        """Makes a tape and does this step both ways; what the model's modules say is what counts."""
        # The last token has looked at all others. Logits of all, of a large vocabulary, take longer than the step.
        compared = sorted({0, packing.token_count - 1, *rows})
        expected = self._run_plainly(packing, compared)
        try:
            tape = Tape(self._graph, self._attention, size)
            results = tape.play(packing, compared)
        except Exception as error:  # noqa: BLE001 - whatever cannot be played is run
            return self._give_up(f"{type(error).__name__}: {error}".partition("\n")[0], packing, rows)
        difference = float((results.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not difference <= _TOLERANCES[expected.dtype]:
            return self._give_up(f"logits differ by {difference:.2g} of the largest", packing, rows)
        self._tapes[size] = tape
        return expected[[compared.index(row) for row in rows]]

    def _give_up(self, reason: str, packing: Packing, rows: list[int]) -> Tensor:
        logger.warning("steps run by the model's modules", extra={"reason": reason})
        self._is_trusted = False
        self._tapes.clear()
        return self._run_plainly(packing, rows)  # once more: the keys and values must be the modules' own


class TapePacking(Packing):
    """Segments that a tape runs."""

    def __init__(self, segments: SequenceOf[Segment], steps: TapeSteps) -> None:
        super().__init__(segments)
        self._steps = steps

    def run(self, rows: list[int]) -> Tensor:
        """See `StepRunner.run`."""
        return self._steps.run(self, rows)

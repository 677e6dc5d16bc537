"""Steps replayed from execution plans: which plans there are, and the trial that each passes before it is trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from torch import Tensor
from torch.fx import GraphModule

from tandem.engine.backends.cpu_native.attention import WIDEST_SEGMENT, NativeAttention
from tandem.engine.backends.cpu_native.plans.execution_plan import ExecutionPlan
from tandem.engine.backends.hidden_states.head_model import HeadModel
from tandem.engine.backends.packing import Packing
from tandem.engine.backends.trial import DistrustedError, Reference, trusted
from tandem.engine.kv_cache.sequence import Segment

logger = logging.getLogger(__name__)

RunModules = Callable[[SequenceOf[Segment], SequenceOf[int]], Tensor]
"""Runs a step by the model's own modules with the kernels in them: the wanted rows of the logits."""

TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224,
                256)  # fmt: skip
"""Sizes of plans. Fewer tokens are padded, which costs little where reading the weights is what takes the time."""

_MANY_TOKENS = 8
"""Where a plan computes the logits of all its tokens, the modules are faster for more than so many of which few are
wanted."""

_FEW_TOKENS = 32
"""Of each sequence but the first in a warm-up step. Sizes above the widest segment are that and a multiple of it."""

_MAX_ERROR = 0.5
"""In spreads, of a step that fills its plan: the plan makes the calls that the modules make, which passed their own
trial. Where tokens are padded, torch may choose another kernel, which adds up in another order, so the error may be
that of any kernel. In float32, 129 tokens in the plan of 160 differ from the modules by 0.2 to 0.52 spreads."""


class PlannedSteps:
    """Compiles the plan of a size when it is first wanted, some ten milliseconds."""

    def __init__(
        self,
        graph: GraphModule,
        attention: NativeAttention,
        reference: Reference,
        run_modules: RunModules,
        head: HeadModel | None = None,
    ) -> None:
        """
        Args:
            graph: the pass; see `tandem.engine.backends.cpu_native.plans.trace.traced`.
            attention: what the layers' attention needs.
            reference: measures a plan's error.
            run_modules: what is compared with.
            head: the model if it is a drafting head.
        """
        self._graph = graph
        self._attention = attention
        self._reference = reference
        self._run_modules = run_modules
        self._head = head
        self._plans: dict[int, ExecutionPlan] = {}
        self._is_trusted = True

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """One of each size; see `StepBackend`. A plan that is compiled later delays everybody: by 0.15 s for 9 million
        parameters on a busy processor. A drafting head reads no prompt beside other sequences."""
        alone = [(size,) for size in TOKEN_COUNTS if size <= WIDEST_SEGMENT]
        wider = [size - WIDEST_SEGMENT for size in TOKEN_COUNTS if size > WIDEST_SEGMENT]
        if self._head is not None:
            return alone
        return alone + [(WIDEST_SEGMENT, *(_FEW_TOKENS,) * (rest // _FEW_TOKENS)) for rest in wider]

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`. A prompt that plans hold comes faster in parts than in one step by the modules."""
        is_faster = self._is_trusted and self._computes_wanted_rows_only
        return min(limit, WIDEST_SEGMENT) if is_faster else limit

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend.run`; by the modules where no plan is right or faster."""
        packing = Packing(segments)
        count = packing.token_count
        is_better_plain = (
            count > _MANY_TOKENS and 2 * len(rows) < count and not self._computes_wanted_rows_only
        )
        if not self._is_trusted or count > TOKEN_COUNTS[-1] or is_better_plain:
            return self._run_modules(segments, rows)
        size = next(size for size in TOKEN_COUNTS if size >= count)
        if size in self._plans:
            return self._replayed(self._plans[size], packing, rows)
        return self._try_out(size, packing, rows)

    def replay(self, packing: Packing, rows: SequenceOf[int]) -> Tensor | None:
        """Runs a step of any packing from a plan that is trusted already; None where there is none of its size."""
        size = next((size for size in TOKEN_COUNTS if size >= packing.token_count), 0)
        plan = self._plans.get(size)
        return None if plan is None else plan.replay(packing, rows)

    def _replayed(self, plan: ExecutionPlan, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        if self._head is None:
            return plan.replay(packing, rows)
        states = self._head.states.of_step(packing.segments)
        own_logits = plan.replay(packing, rows, states)
        return self._head.finished(packing.segments, own_logits, plan.fed_back(packing.token_count))

    def _compiled(self, size: int) -> ExecutionPlan:
        states = None if self._head is None else self._head.states.any_states(size)
        return ExecutionPlan(self._graph, self._attention, size, states)

    @property
    def _computes_wanted_rows_only(self) -> bool:
        return any(plan.computes_wanted_rows_only for plan in self._plans.values())

    def _try_out(self, size: int, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        """Compiles a plan and does this step both ways; the modules' logits are the ones that count."""
        # The last token has looked at all others. Logits of all, of a large vocabulary, take longer than the step.
        compared = sorted({0, packing.token_count - 1, *rows})
        expected = self._run_modules(packing.segments, compared)
        try:
            self._plans[size] = trusted(
                lambda: self._compiled(size),
                lambda plan: self._reference.in_spreads(self._replayed(plan, packing, compared), expected),
                _MAX_ERROR if size == packing.token_count else self._reference.limit,
            )
        except DistrustedError as error:
            logger.warning("steps run by the model's modules", extra={"reason": str(error)})
            self._is_trusted = False
            self._plans.clear()
            return self._run_modules(
                packing.segments, rows
            )  # once more: keys and values must be the modules' own
        return expected[[compared.index(row) for row in rows]]

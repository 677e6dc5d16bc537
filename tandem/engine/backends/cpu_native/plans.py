"""Execution plans: a model's pass as a list of calls, learnt by running it once on shapes alone."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import has_side_effect

from tandem.engine.backends.cpu_native.layers import (
    WIDEST_SEGMENT,
    NativeAttention,
    PackedLinear,
    places,
    point,
)
from tandem.engine.backends.cpu_native.library.kernels import KernelCall, Routine, linear_call
from tandem.engine.backends.cpu_native.operations import (
    TorchCall,
    UnknownOperationError,
    copied,
    kernel_calls,
    same,
    torch_call,
)
from tandem.engine.backends.trial import DistrustedError, Reference, trusted
from tandem.engine.hidden_states import HeadModel
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.attention import STEP_ARGUMENT, Scoring
from tandem.engine.steps import Packing

_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)

_library: Any = cast(Any, torch.library.Library)("tandem", "DEF")
_library.define(
    "linear(Tensor inputs, Tensor weights, Tensor? bias, int outputs, ScalarType? dtype) -> Tensor"
)
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float? scale, float? softcap) -> Tensor"
)


def _linear_shape(
    inputs: Tensor, weights: Tensor, bias: Tensor | None, outputs: int, dtype: torch.dtype | None
) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], outputs), dtype=dtype)


def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


for _key in ("Meta", "CPU"):  # while a plan is compiled, shapes are all that is wanted on a CPU as well
    _library.impl("linear", _linear_shape, _key)
    _library.impl("attend", _attend_shape, _key)

LINEAR: Any = torch.ops.tandem.linear.default
ATTEND: Any = torch.ops.tandem.attend.default
# It stores keys and values: a trace must not lose one whose result is of no use.
has_side_effect(ATTEND)


class TraceError(Exception):
    """The pass is not the same list of operations for all tokens; the text says why. Never leaves the engine."""


class _TracedStep:
    """Stands for any step: shows the arguments of attention, not its results."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        scale, softcap, sinks, _ = scoring
        return ATTEND(query, key, value, sinks, module.layer_idx, scale, softcap)  # type: ignore[no-any-return]


class _TracedKernels:
    """Stands for the kernels of a packed layer."""

    def linear(
        self,
        inputs: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        output_width: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return LINEAR(inputs, weights, bias, output_width, dtype)  # type: ignore[no-any-return]


MakeTrace = Callable[[], GraphModule]
"""Traces a model's pass, or returns the trace that was made before; see `traced`."""


def traced(module: nn.Module) -> GraphModule:
    """The pass of any number of tokens: from ids and positions, each [1, tokens], to logits [1, tokens, vocabulary].
    A drafting head's also reads states and ends in those that it feeds back (`HeadModel.computed`).

    Nothing else may run the module meanwhile.

    Raises:
        TraceError: what is computed depends on the tokens themselves, as a choice of experts does.
    """

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        output = module(
            input_ids=token_ids, position_ids=positions, logits_to_keep=0, use_cache=False,
            **{STEP_ARGUMENT: _TracedStep()},
        )  # fmt: skip
        logits: Tensor = output.logits
        return logits

    tokens = torch.arange(7)[None]  # any number that is no other size of a model
    inputs, of_inputs = [tokens, tokens.clone()], cast(Any, forward)
    if isinstance(module, HeadModel):
        inputs.append(module.states.any_states(tokens.numel()))
        of_inputs = partial(module.computed, step=_TracedStep())
    with torch.no_grad(), _stand_ins(module), _quiet():
        try:
            graph = make_fx(of_inputs, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
        except Exception as error:  # noqa: BLE001 - what cannot be traced runs as it is
            raise TraceError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
    for node in graph.graph.nodes:
        if any(tag in getattr(node.target, "tags", ()) for tag in _REFUSED_TAGS):
            raise TraceError(f"{node.target} depends on the tokens")
    _drop_repeated_casts(graph)
    return graph


def _drop_repeated_casts(graph: GraphModule) -> None:
    """Lets layers that round the same numbers share the result, as a norm's output for query, key and value."""
    nodes = list(graph.graph.nodes)
    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in nodes):
        return  # the numbers might change between two casts
    first: dict[tuple[Any, ...], Any] = {}
    for node in nodes:
        if node.target is torch.ops.aten._to_copy.default:
            same = first.setdefault((*node.args, *sorted(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.graph.erase_node(node)
    graph.recompile()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs untraceable code at length; one line of our own log suffices."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _stand_ins(module: nn.Module) -> Iterator[None]:
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    kernels = [layer._kernels for layer in layers]
    for layer in layers:
        layer._kernels = _TracedKernels()
    try:
        yield
    finally:
        for layer, own in zip(layers, kernels, strict=True):
            layer._kernels = own


Call = KernelCall | TorchCall

_new_storage: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage  # untyped in torch


class Head:
    """The last linear layer of a pass, which is computed for the wanted tokens alone."""

    def __init__(self, inputs: Tensor, weights: Tensor, bias: Tensor | None, output: Tensor) -> None:
        chosen = torch.empty_like(inputs)
        table = inputs.view(-1, inputs.shape[-1])
        rows = torch.arange(table.shape[0])
        self._rows = rows.numpy()
        gather = kernel_calls(torch.ops.aten.embedding.default, (table, rows), {}, chosen)
        self.calls = [*gather, linear_call(chosen, weights, bias, output)]
        self._gather, self._linear = (call.arguments for call in self.calls)
        self._kept = (chosen, inputs, rows)

    def choose(self, rows: SequenceOf[int]) -> None:
        """Let the first rows of the output be those of these tokens from now on."""
        self._rows[: len(rows)] = rows
        self._gather.count = self._linear.rows = len(rows)


class PlanCompiler:
    """Goes through the graph twice: to find the lifetime of each result, and to assign memory."""

    def __init__(
        self,
        graph: GraphModule,
        attention: NativeAttention,
        inputs: Tensor,
        places: Tensor,
        states: Tensor | None = None,
    ) -> None:
        """Binds; the arena is not touched.

        Args:
            inputs: int64 [2, tokens], from which the calls will read ids and positions.
            places: from where they will read what `tandem.engine.backends.cpu_native.layers.places` says, a row for
                each group of layers.
            states: [tokens, state_size], from where a drafting head's pass will read states.
        """
        self._graph = graph
        self._attention = attention
        self._kernels = attention.kernels
        self._inputs = [inputs[:1], inputs[1:]] if states is None else [inputs[:1], inputs[1:], states]
        self._places = places
        self._nodes = list(graph.graph.nodes)
        self.calls: list[Call] = []
        self.kept: list[object] = []
        """Objects that must live as long as the calls."""
        self._storages: dict[Node, torch.UntypedStorage] = {}
        self._pool: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self.head: Head | None = None
        self.most_numbers = 0
        """In the largest result that one of torch's own operations writes."""
        last = self._nodes[-1].args[0]
        self._results: tuple[Node, ...] = tuple(last) if isinstance(last, tuple | list) else (last,)
        self.outputs: list[Tensor] = []
        """The logits, and what a drafting head feeds back."""
        with torch.no_grad():
            # All zeros would hide a mistake, and no model has fewer than 8 ids and positions.
            inputs[:] = torch.arange(inputs.shape[1]) % 8
            self._survey()
            self._bind()
            inputs.zero_()

    def joined_calls(self) -> list[TorchCall]:
        """The calls, those of kernels that follow on each other as one."""
        joined: list[TorchCall] = []
        for is_kernel, group in groupby(self.calls, lambda call: isinstance(call, KernelCall)):
            if is_kernel:
                joined.append(self._kernels.joined(cast("list[KernelCall]", list(group))))
            else:
                joined += cast("list[TorchCall]", group)
        return joined

    # ---- first pass

    def _survey(self) -> None:
        """Runs all nodes on memory of their own."""
        self._values: dict[Node, Any] = {}
        self._root: dict[Node, Node] = {}
        self._last_use: dict[Node, int] = {}
        owner: dict[int, Node] = {}
        for index, node in enumerate(self._nodes):
            value = self._evaluate(node)
            self._values[node] = value
            for part in value if isinstance(value, tuple | list) else ():
                owner.setdefault(_memory(part), node)
            if isinstance(value, Tensor):
                self._root[node] = owner.setdefault(_memory(value), node)
                for user in (node, *node.all_input_nodes):
                    if user in self._root:
                        self._last_use[self._root[user]] = index

    def _evaluate(self, node: Node) -> Any:
        match node.op:
            case "placeholder":
                index = [other for other in self._nodes if other.op == "placeholder"].index(node)
                return self._inputs[index]
            case "get_attr":
                return getattr(self._graph, str(node.target))
            case "output":
                return None
        arguments, named = self._arguments(node)
        return node.target(*arguments, **named)  # type: ignore[operator]

    def _arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def value(part: Node) -> Any:
            return self._values[part]

        return torch.fx.map_arg((node.args, node.kwargs), value)

    # ---- second pass

    def _bind(self) -> None:
        """Runs all nodes again on memory that is used over and over, and notes the call that each one is."""
        shapes = dict(self._values)
        released = self._released()
        for index, node in enumerate(self._nodes):
            if node.op == "output":
                self.outputs = [self._values[each] for each in self._results]
            elif node.op == "call_function":
                self._bind_node(node, shapes[node])
            self.kept.append(self._values.get(node))
            for root in released[index]:
                if root in self._storages:
                    storage = self._storages[root]
                    self._pool[storage.nbytes()].append(storage)

    def _bind_node(self, node: Node, like: Any) -> None:
        """Gives the node's value a place, and notes what computes it."""
        if isinstance(like, Tensor) and self._root[node] is node:
            self._storages[node] = _storage_like(like, self._pool)
            self._values[node] = _on(self._storages[node], like)
            self.calls += self._writing(node, self._values[node])
            return
        self._values[node] = self._evaluate(node)
        arguments, named = self._arguments(node)
        if isinstance(like, tuple | list):
            if not all(_memory(part) in self._known for part in self._values[node]):
                self.calls.append(copied(node.target, arguments, named, self._values[node]))
        elif isinstance(like, Tensor) and node.target is not getitem and _is_mutable(node.target):
            self.calls.append(partial(cast(Any, node.target), *arguments, **named))

    @property
    def _known(self) -> set[int]:
        values = (value for value in self.kept if isinstance(value, Tensor))
        return {_memory(value) for value in values}

    def _released(self) -> dict[int, list[Node]]:
        """Nodes whose memory is free once a node has run. That of the results never is."""
        kept = {self._root[each] for each in self._results}
        released = defaultdict(list)
        for root, index in self._last_use.items():
            if root not in kept:
                released[index].append(root)
        return released

    def _writing(self, node: Node, output: Tensor) -> SequenceOf[Call]:
        """Return the operation that writes the node's value to `output`. It has run once, so that the next node
        finds its inputs."""
        arguments, named = self._arguments(node)
        if node.target is LINEAR:
            return self._linear(node, output, *arguments)
        if node.target is ATTEND:
            return self._attend(output, *arguments)
        expected = cast(Any, node.target)(*arguments, **named)
        try:
            calls = kernel_calls(node.target, arguments, named, output)
        except UnknownOperationError:
            pass
        else:
            output.zero_()
            self._kernels.run(*calls)
            if same(output, expected):
                self.kept.append(arguments)
                return calls
        self.most_numbers = max(self.most_numbers, output.numel())
        return [torch_call(node.target, arguments, named, output, expected)]

    def _linear(
        self, node: Node, output: Tensor, inputs: Tensor, weights: Tensor, bias: Tensor | None, *_: object
    ) -> SequenceOf[Call]:
        output.zero_()
        self.kept += (weights, bias)
        inputs = self._laid(inputs, inputs.is_contiguous())
        if self._root[node] is not self._root[self._results[0]]:
            return [linear_call(inputs, weights, bias, output)]
        self.head = Head(inputs, weights, bias, output)
        return self.head.calls

    def _attend(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: int,
        scale: float | None,
        softcap: float | None,
    ) -> SequenceOf[Call]:
        output.zero_()
        query, key, value = (self._laid(states, states.stride(3) == 1) for states in (query, key, value))
        call = self._attention.new_call(layer)
        self.kept.append(point(call, query, key, value, output, Scoring(scale, softcap, sinks)))
        call.segments = self._places[self._attention.group_of(layer)].data_ptr()
        return [KernelCall(Routine.ATTEND, call)]

    def _laid(self, states: Tensor, is_laid: bool) -> Tensor:
        """The numbers in the order that a kernel reads, by a copy at each playing where they are not."""
        if is_laid:
            return states
        copy = torch.empty_like(states, memory_format=torch.contiguous_format)
        self.kept.append(copy)
        self.calls.append(partial(copy.copy_, states))
        return copy


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _storage_like(value: Tensor, pool: dict[int, list[torch.UntypedStorage]]) -> torch.UntypedStorage:
    size = value.untyped_storage().nbytes()
    return pool[size].pop() if pool[size] else _new_storage(size)


def _on(storage: torch.UntypedStorage, value: Tensor) -> Tensor:
    return torch.empty(0, dtype=value.dtype).set_(
        storage, value.storage_offset(), value.shape, value.stride()
    )


def _is_mutable(target: Any) -> bool:
    return bool(target._schema.is_mutable)


_ONE_THREADS_NUMBERS = 32_768
"""Results up to which torch itself computes most operations in one thread. Some it does not: for the cosines of 160
numbers it wakes a second one, which takes 105 us where they take 3. docs/measurements.md has more."""


class ExecutionPlan:
    """The pass over `token_count` tokens."""

    def __init__(
        self,
        graph: GraphModule,
        attention: NativeAttention,
        token_count: int,
        states: Tensor | None = None,
    ) -> None:
        """Lays out memory and binds the calls. The arena is not touched.

        Args:
            token_count: of the pass.
            states: [token_count, state_size], any that a drafting head may read, to try its calls with.
        """
        inputs = torch.zeros(2, token_count, dtype=torch.long)
        where = torch.zeros(attention.group_count, 1 + 6 * token_count, dtype=torch.long)  # see `places`
        compiled = PlanCompiler(graph, attention, inputs, where, states)
        self._states = states
        # As numpy's, which take a few numbers in a third of the time that torch takes.
        self._token_ids, self._positions = inputs.numpy()
        self._places = where.numpy()
        self._head = compiled.head
        self._logits = compiled.outputs[0][0]
        self._fed_back = compiled.outputs[1:]
        self._calls = compiled.joined_calls()
        self._kept = compiled.kept
        """The kernels know memory by address only."""
        self._needs_threads = compiled.most_numbers > _ONE_THREADS_NUMBERS

    @property
    def computes_wanted_rows_only(self) -> bool:
        """True if logits of further tokens are free."""
        return self._head is not None

    def fed_back(self, token_count: int) -> Tensor:
        """States that a drafting head's last pass feeds back, [token_count, state_size]; the next pass changes them."""
        return self._fed_back[0][:token_count]

    def replay(self, packing: Packing, rows: SequenceOf[int], states: Tensor | None = None) -> Tensor:
        """Runs a step of no more tokens than the plan's, and stores keys and values. A drafting head reads `states`.

        Returns:
            The logits of the tokens that `rows` names, [len(rows), vocabulary_size]; no later replay changes them.
        """
        count = packing.token_count
        self._token_ids[:count] = packing.token_ids()
        self._positions[:count] = packing.positions()
        if self._states is not None and states is not None:
            self._states[:count] = states
        for group, own in enumerate(self._places):
            where = places(packing, group)
            own[: len(where)] = where
        if self._head is not None:
            self._head.choose(rows)
        if self._needs_threads:
            self._replay()
        else:
            self._replay_in_one_thread()
        return self._logits[: len(rows)].clone() if self._head is not None else self._logits[rows]

    def _replay_in_one_thread(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # our kernels keep to the number that they were bound with
        try:
            self._replay()
        finally:
            torch.set_num_threads(threads)

    def _replay(self) -> None:
        for call in self._calls:
            call()


logger = logging.getLogger(__name__)

RunModules = Callable[[SequenceOf[Segment], SequenceOf[int]], Tensor]
"""Runs a step by the model's own modules with the kernels in them: the wanted rows of the logits."""

TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224,
                256)  # fmt: skip
"""Sizes of plans. Fewer tokens are padded, which costs little where reading the weights is what takes the time."""


_FEW_TOKENS = 32
"""Tokens of each sequence but the first in a warm-up step: sizes above the widest segment are that and a multiple."""


@dataclass(slots=True, eq=False)
class PlannedSteps:
    """Compiles the plan of a size when it is first wanted, some ten milliseconds."""

    graph: GraphModule
    attention: NativeAttention
    reference: Reference
    """Measures a plan's error."""
    run_modules: RunModules
    """Computes what a plan is compared with."""
    head: HeadModel | None = None
    _plans: dict[int, ExecutionPlan] = field(default_factory=dict, init=False)
    _is_trusted: bool = field(default=True, init=False)

    @property
    def warm_up_steps(self) -> SequenceOf[tuple[int, ...]]:
        """One of each size; see `StepBackend`. A plan that is compiled later delays everybody: by 0.15 s for 9 million
        parameters on a busy processor. A drafting head reads no prompt beside other sequences."""
        alone = [(size,) for size in TOKEN_COUNTS if size <= WIDEST_SEGMENT]
        wider = [size - WIDEST_SEGMENT for size in TOKEN_COUNTS if size > WIDEST_SEGMENT]
        if self.head is not None:
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
        # Without a head, a plan computes the logits of all its tokens: beyond this many, of which few are
        # wanted, the modules are faster.
        is_better_plain = count > 8 and 2 * len(rows) < count and not self._computes_wanted_rows_only
        if not self._is_trusted or count > TOKEN_COUNTS[-1] or is_better_plain:
            return self.run_modules(segments, rows)
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
        if self.head is None:
            return plan.replay(packing, rows)
        states = self.head.states.of_step(packing.segments)
        own_logits = plan.replay(packing, rows, states)
        return self.head.finished(packing.segments, own_logits, plan.fed_back(packing.token_count))

    def _compiled(self, size: int) -> ExecutionPlan:
        states = None if self.head is None else self.head.states.any_states(size)
        return ExecutionPlan(self.graph, self.attention, size, states)

    @property
    def _computes_wanted_rows_only(self) -> bool:
        return any(plan.computes_wanted_rows_only for plan in self._plans.values())

    def _try_out(self, size: int, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        """Compiles a plan and does this step both ways; the modules' logits are the ones that count."""
        # The last token has looked at all others. Logits of all, of a large vocabulary, take longer than the step.
        compared = sorted({0, packing.token_count - 1, *rows})
        expected = self.run_modules(packing.segments, compared)
        try:
            # Half a spread where the step fills its plan, which makes the calls of the modules. Where tokens are
            # padded, torch may choose a kernel that adds up in another order, so the error may be that of any
            # kernel: in float32, 129 tokens in the plan of 160 differ from the modules by 0.2 to 0.52 spreads.
            self._plans[size] = trusted(
                lambda: self._compiled(size),
                lambda plan: self.reference.in_spreads(self._replayed(plan, packing, compared), expected),
                0.5 if size == packing.token_count else self.reference.limit,
            )
        except DistrustedError as error:
            logger.warning("steps run by the model's modules", extra={"reason": str(error)})
            self._is_trusted = False
            self._plans.clear()
            # Once more: keys and values must be the modules' own
            return self.run_modules(packing.segments, rows)
        return expected[[compared.index(row) for row in rows]]

"""Execution plans: a model's pass as a list of calls, learnt by running it once without its products.

A call writes its results to a given place. Small operations are calls of a kernel where it gives the bits of torch's.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.engine.backends.cpu_native.layers import NativeAttention, places, point, tracing
from tandem.engine.backends.cpu_native.library.kernels import (
    DIMENSIONS,
    DTYPES,
    INT64_KIND,
    GatherCall,
    KernelCall,
    MeanCall,
    Operand,
    Operation,
    PointwiseCall,
    Routine,
    kind_of,
    linear_call,
)
from tandem.engine.hidden_states import HeadModel
from tandem.engine.models.attention import STEP_ARGUMENT, Scoring
from tandem.engine.steps import Packing

_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_READERS = ("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "__dlpack__")
"""Methods by which a tensor's numbers leave torch without an operation."""

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


class TraceError(Exception):
    """The pass is not the same list of operations for all tokens; the text says why. Never leaves the engine."""


class _TracedStep:
    """Stands for any step: shows the arguments of attention, not its results."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        scale, softcap, sinks, _ = scoring
        return ATTEND(query, key, value, sinks, module.layer_idx, scale, softcap)  # type: ignore[no-any-return]


class _Pass(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Sees the operations of a pass while it runs."""

    def __init__(self, *, shares_casts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._casts: dict[tuple[Any, ...], Any] | None = {} if shares_casts else None
        """Layers that round the same numbers share the result, as a norm's output for query, key and value."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if any(tag in func.tags for tag in _REFUSED_TAGS):
            raise TraceError(f"{func} depends on the tokens")
        if self._casts is None or func is not _aten._to_copy.default:
            return self.value(func, args, named)
        key = (id(args[0]), *args[1:], *sorted(named.items()))
        if key not in self._casts:
            self._casts[key] = self.value(func, args, named)
        return self._casts[key]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it wraps each operation in two more calls

    def value(self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of the operation, as the pass goes on with it."""
        raise NotImplementedError


class _RefusedReads(TorchFunctionMode):
    """Refuses to let numbers leave torch: what became of them would be the same for all tokens."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ in _READERS:
            raise TraceError(f"{func.__name__} reads the numbers of a tensor")
        return func(*args, **kwargs or {})


class Survey(_Pass):  # type: ignore[no-untyped-call]
    """Keeps all values, so that those that share memory are seen."""

    def __init__(self, *, shares_casts: bool) -> None:
        super().__init__(shares_casts=shares_casts)
        self.noted: list[tuple[Any, list[Tensor], list[Tensor]]] = []
        """Operations, the tensors that they read, and those that they give."""

    def value(self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        value = target(*arguments, **named)
        self.noted.append((target, _tensors((arguments, named)), _tensors(value)))
        return value


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _any_tokens(count: int) -> Tensor:
    """Ids or positions that each model has, [1, count]. All zeros would hide a mistake."""
    return torch.arange(count)[None] % 3


class Trace:
    """A model's pass, and what is the same for any number of tokens: its operations, and which share their memory."""

    def __init__(self, module: Callable[..., Any]) -> None:
        """A TraceError says that what is computed depends on the tokens themselves, as a choice of experts does."""
        self._module: Any = module
        self.shares_casts = True
        try:
            survey = self._survey()
            if any(target._schema.is_mutable for target, _, _ in survey.noted):
                self.shares_casts = False  # the numbers might change between two casts
                survey = self._survey()
        except TraceError:
            raise
        except Exception as error:  # noqa: BLE001 - what cannot be traced runs as it is
            raise TraceError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
        self.targets = [target for target, _, _ in survey.noted]
        self.makes_memory: list[bool] = []
        """By operation, whether its tensors are new ones."""
        owners: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for index, (_, read, given) in enumerate(survey.noted):
            for tensor in read:
                owners.setdefault(_memory(tensor), -1)  # a weight
            roots = {owners.setdefault(_memory(tensor), index) for tensor in given}
            self.makes_memory.append(roots == {index})
            last_use |= dict.fromkeys([*roots, *(owners[_memory(tensor)] for tensor in read)], index)
        kept = [owners[_memory(result)] for result in self._results]
        self.last = kept[0]
        """The operation that makes the logits."""
        self.released: list[list[int]] = [[] for _ in self.targets]
        """By operation, those whose memory is free once it has run. That of the results never is."""
        for root, index in last_use.items():
            if root not in kept:
                self.released[index].append(root)
        del self._results

    def _survey(self) -> Survey:
        survey = Survey(shares_casts=self.shares_casts)
        # Tensors of that mode hide what an operation consists of.
        with torch.inference_mode(False), _RefusedReads():
            tokens = _any_tokens(7)
            inputs = [tokens, tokens.clone()]
            if isinstance(self._module, HeadModel):
                inputs.append(self._module.states.any_states(tokens.numel()))
            self._results = self.run(survey, *inputs)
        return survey

    def run(self, mode: _Pass, token_ids: Tensor, positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Runs the pass: from ids and positions, each [1, tokens], to logits [1, tokens, vocabulary]. A drafting head's
        also reads states, and ends in those that it feeds back (`HeadModel.compute`)."""
        with torch.no_grad(), show_products(), mode:
            if states:
                logits, fed_back = self._module.compute(token_ids, positions, *states, step=_TracedStep())
                return (logits,) if fed_back is None else (logits, fed_back)
            output = self._module(
                input_ids=token_ids, position_ids=positions, logits_to_keep=0, use_cache=False,
                **{STEP_ARGUMENT: _TracedStep()},
            )  # fmt: skip
            return (output.logits,)


MakeTrace = Callable[[], Trace]
"""Traces a model's pass, or returns the trace that was made before."""


@contextmanager
def show_products() -> Iterator[None]:
    """Let packed layers show their products meanwhile."""
    tracing.linear = LINEAR
    try:
        yield
    finally:
        del tracing.linear


_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.clone.default)


class UnknownOperationError(Exception):
    """The kernels cannot compute this operation; the text says why. Never leaves this package."""


def kernel_calls(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
) -> list[KernelCall]:
    """The calls that write an operation's result to `output`; the tensors must outlive them. The named arguments of a
    copy say what `output` is already."""
    maker = _MAKERS.get(target)
    if maker is None or (named and target not in _COPIES):
        raise UnknownOperationError(f"{target} with {', '.join(named) or 'any arguments'}")
    return maker(output, *arguments)


def _elementwise(operation: Operation, output: Tensor, *arguments: Any) -> list[KernelCall]:
    is_cast = len(arguments) == 1 and arguments[0].dtype != output.dtype
    if is_cast and operation is not Operation.COPY:
        raise UnknownOperationError(f"{operation.name} from {arguments[0].dtype} to {output.dtype}")
    return [_pointwise(operation, output, *arguments)]


def _power(output: Tensor, value: Tensor, exponent: float) -> list[KernelCall]:
    if exponent != 2:
        raise UnknownOperationError(f"to the power of {exponent}")
    return _elementwise(Operation.SQUARE, output, value)


def _concatenation(output: Tensor, parts: SequenceOf[Tensor], dim: int = 0) -> list[KernelCall]:
    places = torch.split(output, [part.shape[dim] for part in parts], dim)
    return [_pointwise(Operation.COPY, place, part) for place, part in zip(places, parts, strict=True)]


def _mean(output: Tensor, value: Tensor, dims: list[int], _keepdim: bool = False) -> list[KernelCall]:
    are_plain = value.is_contiguous() and output.is_contiguous()
    is_last = [dim % value.dim() for dim in dims] == [value.dim() - 1]
    if not (is_last and are_plain and output.dtype == value.dtype == torch.float32):
        raise UnknownOperationError("a mean of what does not lie side by side")
    width = value.shape[-1]
    if width < 8:  # torch sums eight numbers side by side
        raise UnknownOperationError("a mean of so few that torch takes them in another order")
    call = MeanCall(value.data_ptr(), output.data_ptr(), value.numel() // width, width)
    return [KernelCall(Routine.MEAN, call)]


def _embedding(output: Tensor, table: Tensor, ids: Tensor, *_: object) -> list[KernelCall]:
    if ids.dtype != torch.int64 or not all(each.is_contiguous() for each in (table, ids, output)):
        raise UnknownOperationError("a look-up in what does not lie side by side")
    call = GatherCall(
        table.data_ptr(), ids.data_ptr(), output.data_ptr(), ids.numel(), table.shape[0],
        table.shape[1] * table.element_size(),
    )  # fmt: skip
    return [KernelCall(Routine.GATHER, call)]


_MAKERS: dict[Any, Callable[..., list[KernelCall]]] = {
    **dict.fromkeys(_COPIES, partial(_elementwise, Operation.COPY)),
    _aten.neg.default: partial(_elementwise, Operation.NEGATE),
    _aten.rsqrt.default: partial(_elementwise, Operation.RECIPROCAL_ROOT),
    _aten.silu.default: partial(_elementwise, Operation.SILU),
    _aten.add.Tensor: partial(_elementwise, Operation.ADD),
    _aten.mul.Tensor: partial(_elementwise, Operation.MULTIPLY),
    _aten.pow.Tensor_Scalar: _power,
    _aten.cat.default: _concatenation,
    _aten.mean.dim: _mean,
    _aten.embedding.default: _embedding,
}


def _pointwise(
    operation: Operation, output: Tensor, first: Tensor, second: Tensor | float | None = None
) -> KernelCall:
    tensors = [output, first, *([second] if isinstance(second, Tensor) else [])]
    if any(tensor.dim() == 0 and tensor.dtype != output.dtype for tensor in tensors):
        raise UnknownOperationError("a single number that torch rounds first")
    try:
        expanded = tuple(tensor.expand(output.shape).stride() for tensor in tensors)
    except RuntimeError as error:
        raise UnknownOperationError(str(error)) from None
    sizes, of_tensors = _dimensions(output.shape, expanded)
    strides = list(of_tensors)
    if strides[1][-1] == 0:  # sums and products are the same the other way round
        tensors[1:] = tensors[:0:-1]
        strides[1:] = strides[:0:-1]
    if strides[0][-1] != 1 or strides[1][-1] != 1 or strides[-1][-1] not in {0, 1}:
        raise UnknownOperationError(f"{operation.name} of numbers that do not lie side by side")
    call = PointwiseCall(operation, (ctypes.c_int64 * DIMENSIONS)(*sizes))
    for place, tensor, steps in zip(("output", "first", "second"), tensors, strides, strict=False):
        if tensor.dtype not in DTYPES and (tensor.dtype != torch.int64 or operation is not Operation.COPY):
            raise UnknownOperationError(f"{operation.name} of {tensor.dtype}")
        kind = kind_of(tensor.dtype) if tensor.dtype in DTYPES else INT64_KIND
        setattr(call, place, Operand(tensor.data_ptr(), kind, (ctypes.c_int64 * DIMENSIONS)(*steps)))
    if second is not None and not isinstance(second, Tensor):
        if float(torch.tensor(second, dtype=output.dtype)) != torch.tensor(second, dtype=torch.float32):
            raise UnknownOperationError(f"{second}, which torch rounds for some numbers and not for others")
        call.number = second
        address = ctypes.addressof(call) + PointwiseCall.number.offset
        call.second = Operand(address, kind_of(torch.float32))
    return KernelCall(Routine.POINTWISE, call)


@lru_cache(1024)  # the layers of a model are alike
def _dimensions(shape: torch.Size, strides: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[list[int]]]:
    """Merge adjacent dimensions where possible, and pad in front up to `DIMENSIONS`."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        steps = [each[dim] for each in strides]
        if sizes and all(step == so_far[0] * sizes[0] for step, so_far in zip(steps, kept, strict=True)):
            sizes[0] *= shape[dim]
            continue
        sizes.insert(0, shape[dim])
        for step, so_far in zip(steps, kept, strict=True):
            so_far.insert(0, step)
    if not sizes:  # a single number
        sizes = [1]
        kept = [[1] for _ in strides]
    if len(sizes) > DIMENSIONS:
        raise UnknownOperationError(f"{len(sizes)} dimensions")
    missing = DIMENSIONS - len(sizes)
    return [1] * missing + sizes, [[0] * missing + each for each in kept]


TorchCall = Callable[[], object]


def torch_call(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor, expected: Tensor
) -> TorchCall:
    """The cheapest call by which an operation of torch writes its result to `output`, with the bits of `expected`. It
    has run once when this returns."""
    for call in _candidates(target, arguments, named, output):
        output.zero_()
        try:
            call()
        except (TypeError, RuntimeError):
            continue
        if same(output, expected):
            return call
    copy = make_copying_call(target, arguments, named, (output,))
    copy()
    return copy


def _candidates(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
) -> list[TorchCall]:
    """Ways to have the operation write to `output`, the cheapest to call first."""
    if target in _COPIES:
        return [partial(output.copy_, arguments[0])]
    name = target._schema.name.partition("::")[2]
    found: list[TorchCall] = [
        partial(function, *arguments, **named, out=output)
        for function in (getattr(place, name, None) for place in (torch, torch._C._nn))
        if function is not None
    ]
    packet = getattr(_aten, name)
    found += [partial(getattr(packet, overload), *arguments, **named, out=output)
              for overload in packet.overloads() if "out" in overload]  # fmt: skip
    return found


def make_copying_call(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], outputs: SequenceOf[Tensor]
) -> TorchCall:
    """A call for any operation: computes elsewhere, and copies to the outputs."""

    def call() -> None:
        results = target(*arguments, **named)
        parts = (results,) if isinstance(results, Tensor) else results
        for output, result in zip(outputs, parts, strict=True):
            output.copy_(result)

    return call


def same(results: Tensor, expected: Tensor) -> bool:
    """True if all numbers are equal; those that are none are equal to each other."""
    return torch.equal(results, expected) or (
        results.shape == expected.shape and torch.equal(results.nan_to_num(), expected.nan_to_num())
    )


def _near(results: Tensor, expected: Tensor) -> bool:
    """True if all numbers are equal up to their last place. torch takes the last few of a tensor by another exponential
    than the others, so that those of a token depend on how many tokens there are; the kernel has one for all."""
    rounding = 2.0 * torch.finfo(results.dtype).eps
    return torch.allclose(results, expected, rtol=rounding, atol=0.0, equal_nan=True)


Call = KernelCall | TorchCall

_new_storage: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage  # untyped in torch


class Head:
    """The last linear layer of a pass, which is computed for the wanted tokens alone."""

    def __init__(self, inputs: Tensor, weights: Tensor, bias: Tensor | None, output: Tensor) -> None:
        chosen = torch.empty_like(inputs)
        table = inputs.view(-1, inputs.shape[-1])
        rows = torch.arange(table.shape[0])
        self._rows = rows.numpy()
        self.calls = [*_embedding(chosen, table, rows), linear_call(chosen, weights, bias, output)]
        self._gather, self._linear = (call.arguments for call in self.calls)
        self._kept = (chosen, inputs, rows)

    def choose(self, rows: SequenceOf[int]) -> None:
        """Let the first rows of the output be those of these tokens from now on."""
        self._rows[: len(rows)] = rows
        self._gather.count = self._linear.rows = len(rows)


class PlanCompiler(_Pass):  # type: ignore[no-untyped-call]
    """Runs a trace on memory that is used over and over, and notes the call that each operation is."""

    def __init__(
        self,
        trace: Trace,
        attention: NativeAttention,
        inputs: Tensor,
        places: Tensor,
        states: Tensor | None = None,
    ) -> None:
        """Binds; the arena is not touched. The calls will read ids and positions from `inputs`, int64 [2, tokens], what
        `layers.places` says from a row of `places` for each group of layers, and those of a drafting head `states`,
        [tokens, state_size]."""
        super().__init__(shares_casts=trace.shares_casts)
        self._trace = trace
        self._attention = attention
        self._kernels = attention.kernels
        self._places = places
        self._index = -1
        self.calls: list[Call] = []
        self.kept: list[object] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._pool: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self.head: Head | None = None
        self.most_numbers = 0
        """In the largest result that one of torch's own operations writes."""
        inputs[:] = _any_tokens(inputs.shape[1])
        self.outputs = trace.run(self, inputs[:1], inputs[1:], *([] if states is None else [states]))
        """The logits, and what a drafting head feeds back."""
        inputs.zero_()

    def joined_calls(self) -> list[TorchCall]:
        joined: list[Any] = []
        for is_kernel, group in groupby(self.calls, lambda call: isinstance(call, KernelCall)):
            calls: list[Any] = list(group)
            joined += [self._kernels.join(calls)] if is_kernel else calls
        return joined

    def value(self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._index += 1
        if self._trace.targets[self._index : self._index + 1] != [target]:
            raise TraceError(f"{target} is not what other numbers of tokens need")
        value = self._bound(target, arguments, named)
        self.kept.append((arguments, named, value))
        for root in self._trace.released[self._index]:
            if storage := self._storages.get(root):
                self._pool[storage.nbytes()].append(storage)
        return value

    def _bound(self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """An operation's value, for which there is a call where it takes one."""
        value = target(*arguments, **named)
        if not self._trace.makes_memory[self._index]:
            if target._schema.is_mutable:
                self.calls.append(partial(target, *arguments, **named))
            return value
        if not isinstance(value, Tensor):
            self.calls.append(make_copying_call(target, arguments, named, value))
            return value
        size = value.untyped_storage().nbytes()
        free = self._pool[size]
        storage = self._storages[self._index] = free.pop() if free else _new_storage(size)
        output = torch.empty(0, dtype=value.dtype)
        output.set_(storage, value.storage_offset(), value.shape, value.stride())
        self.calls += self._writing(target, arguments, named, output, value)
        return output

    def _writing(
        self, target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor, expected: Tensor
    ) -> SequenceOf[Call]:
        """The calls that write the value to `output`; they have run, so that the next operation finds its inputs."""
        if target is LINEAR:
            return self._linear(output, *arguments)
        if target is ATTEND:
            return self._attend(output, *arguments)
        with suppress(UnknownOperationError):
            calls = kernel_calls(target, arguments, named, output)
            output.zero_()
            self._kernels.run(*calls)
            if (_near if target is _aten.silu.default else same)(output, expected):
                return calls
        self.most_numbers = max(self.most_numbers, output.numel())
        return [torch_call(target, arguments, named, output, expected)]

    def _linear(
        self, output: Tensor, inputs: Tensor, weights: Tensor, bias: Tensor | None, *_: object
    ) -> SequenceOf[Call]:
        output.zero_()
        inputs = self._laid(inputs, inputs.is_contiguous())
        if self._index != self._trace.last:
            return [linear_call(inputs, weights, bias, output)]
        self.head = Head(inputs, weights, bias, output)
        return self.head.calls

    def _attend(self, output: Tensor, *arguments: Any) -> SequenceOf[Call]:
        output.zero_()
        *states, sinks, layer, scale, softcap = arguments
        query, key, value = (self._laid(each, each.stride(3) == 1) for each in states)
        call = self._attention.new_call(layer)
        self.kept.append(point(call, query, key, value, output, Scoring(scale, softcap, sinks)))
        call.segments = self._places[self._attention.arena.layers[layer].group].data_ptr()
        return [KernelCall(Routine.ATTEND, call)]

    def _laid(self, states: Tensor, is_laid: bool) -> Tensor:
        """The numbers in the order that a kernel reads, by a copy at each playing where they are not."""
        if is_laid:
            return states
        copy = torch.empty_like(states, memory_format=torch.contiguous_format)
        self.kept.append(copy)
        self.calls.append(partial(copy.copy_, states))
        return copy


_ONE_THREADS_NUMBERS = 32_768
"""Results up to which torch itself computes most operations in one thread. Some it does not: for the cosines of 160
numbers it wakes a second one, which takes 105 us where they take 3."""


class ExecutionPlan:
    """The pass over `token_count` tokens."""

    def __init__(
        self, trace: Trace, attention: NativeAttention, token_count: int, states: Tensor | None = None
    ) -> None:
        """A drafting head's calls are tried with any `states`, [token_count, state_size]."""
        # Tensors of that mode hide what an operation consists of.
        with torch.inference_mode(False):
            states = None if states is None else states.clone()
            inputs = torch.zeros(2, token_count, dtype=torch.long)
            where = torch.zeros(
                attention.arena.group_count, 1 + 6 * token_count, dtype=torch.long
            )  # see `places`
            compiled = PlanCompiler(trace, attention, inputs, where, states)
        self._states = states
        # As numpy's, which take a few numbers in a third of the time that torch takes.
        self._token_ids, self._positions = inputs.numpy()
        self._places = where.numpy()
        self._head = compiled.head
        self.computes_wanted_rows_only = self._head is not None
        self._logits = compiled.outputs[0][0]
        self._fed_back = compiled.outputs[1:]
        self._calls = compiled.joined_calls()
        self._kept = compiled.kept
        """The kernels know memory by address only."""
        self._needs_threads = compiled.most_numbers > _ONE_THREADS_NUMBERS

    def fed_back(self, token_count: int) -> Tensor:
        """States that a drafting head's last pass feeds back, [token_count, state_size]; the next pass changes them."""
        return self._fed_back[0][:token_count]

    def replay(self, packing: Packing, rows: SequenceOf[int], states: Tensor | None = None) -> Tensor:
        """Runs a step of no more tokens than the plan's, and stores keys and values. A drafting head reads `states`.
        Returns logits, [len(rows), vocabulary_size], which no later replay changes."""
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
        threads = torch.get_num_threads()
        if not self._needs_threads:
            torch.set_num_threads(1)  # our kernels keep to the number that they were bound with
        try:
            self._replay()
        finally:
            torch.set_num_threads(threads)
        return self._logits[: len(rows)].clone() if self._head is not None else self._logits[rows]

    def _replay(self) -> None:
        for call in self._calls:
            call()

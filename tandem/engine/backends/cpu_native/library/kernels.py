"""The compiled kernels as Python calls them, and their interface, which is compared when a library is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.library.build import BuildError

_POINTER: Final = ctypes.c_void_p
_INTEGER: Final = ctypes.c_int64

_KINDS = {torch.float32: 0, torch.bfloat16: 1}

DTYPES = frozenset(_KINDS)
"""Data type in which the kernels compute."""

INT64_KIND = len(_KINDS)
"""The word for what can only be read, and only by a copy."""

DIMENSIONS = 4
"""Maximum number of dimensions of an elementwise operation."""


def kind_of(dtype: torch.dtype) -> int:
    """The kernels' word for one of `DTYPES`."""
    return _KINDS[dtype]


class LinearCall(ctypes.Structure):
    """`struct Linear` of linear.h."""

    _fields_ = (
        ("inputs", _POINTER), ("kind", _INTEGER), ("rows", _INTEGER), ("width", _INTEGER),
        ("weights", _POINTER), ("weight_kind", _INTEGER), ("bias", _POINTER),
        ("outputs", _POINTER), ("output_kind", _INTEGER), ("output_width", _INTEGER), ("threads", _INTEGER),
    )  # fmt: skip


class AttentionCall(ctypes.Structure):
    """`struct Attention` of attention.h. `tandem.engine.backends.cpu_native.layers.point` fills in the addresses."""

    _fields_ = (
        ("query", _POINTER), ("key", _POINTER), ("value", _POINTER),
        ("query_head", _INTEGER), ("query_token", _INTEGER),
        ("key_head", _INTEGER), ("key_token", _INTEGER),
        ("value_head", _INTEGER), ("value_token", _INTEGER),
        ("keys", _POINTER), ("values", _POINTER),
        ("page_tokens", _INTEGER), ("kv_heads", _INTEGER), ("heads", _INTEGER),
        ("key_dim", _INTEGER), ("value_dim", _INTEGER),
        ("segments", _POINTER),
        ("window", _INTEGER), ("sinks", _POINTER),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
        ("output", _POINTER), ("kind", _INTEGER), ("threads", _INTEGER),
    )  # fmt: skip


class Operand(ctypes.Structure):
    """`struct Operand` of pointwise.h."""

    _fields_ = (("at", _POINTER), ("kind", _INTEGER), ("strides", _INTEGER * DIMENSIONS))


class PointwiseCall(ctypes.Structure):
    """`struct Pointwise` of pointwise.h."""

    _fields_ = (
        ("operation", _INTEGER), ("sizes", _INTEGER * DIMENSIONS),
        ("output", Operand), ("first", Operand), ("second", Operand), ("number", ctypes.c_float),
    )  # fmt: skip


class MeanCall(ctypes.Structure):
    """`struct Mean` of pointwise.h."""

    _fields_ = (("input", _POINTER), ("output", _POINTER), ("rows", _INTEGER), ("width", _INTEGER))


class GatherCall(ctypes.Structure):
    """`struct Gather` of pointwise.h."""

    _fields_ = (
        ("table", _POINTER), ("ids", _POINTER), ("output", _POINTER),
        ("count", _INTEGER), ("rows", _INTEGER), ("row_bytes", _INTEGER),
    )  # fmt: skip


Routine = IntEnum("Routine", ("LINEAR", "ATTEND", "POINTWISE", "MEAN", "GATHER"), start=0)
"""`enum Routine` of kernels.cpp."""

Operation = IntEnum(
    "Operation", ("COPY", "NEGATE", "SQUARE", "RECIPROCAL_ROOT", "SILU", "ADD", "MULTIPLY"), start=0
)
"""`enum Operation` of pointwise.h."""


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One run of a kernel. Its owner must keep the memory alive that it refers to."""

    routine: Routine
    arguments: ctypes.Structure


class RoutineCall(ctypes.Structure):
    """`struct Call` of kernels.cpp."""

    _fields_ = (("routine", _INTEGER), ("arguments", _POINTER))


EXPECTED: Final = {
    # `INTERFACE_VERSION` rises with every change of a structure, an enumeration, or a function's name or arguments
    "interface version": 5,
    "size of Linear": ctypes.sizeof(LinearCall),
    "size of Attention": ctypes.sizeof(AttentionCall),
    "size of Operand": ctypes.sizeof(Operand),
    "size of Pointwise": ctypes.sizeof(PointwiseCall),
    "size of Mean": ctypes.sizeof(MeanCall),
    "size of Gather": ctypes.sizeof(GatherCall),
    "size of Call": ctypes.sizeof(RoutineCall),
    "number of kinds": len(DTYPES) + 1,  # and that of integers
    "number of routines": len(Routine),
    "number of operations": len(Operation),
    "number of dimensions": DIMENSIONS,
}
"""In the order of `INTERFACE` of kernels.cpp; sizes are in bytes."""


def check_interface(library: ctypes.CDLL) -> None:
    """Compare a loaded library's numbers with `EXPECTED`."""
    try:
        describe: Any = library.tandem_interface
    except AttributeError:
        raise BuildError("the compiled kernels do not state their interface version") from None
    describe.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    describe.restype = ctypes.c_int64
    numbers = (ctypes.c_int64 * len(EXPECTED))()
    count = describe(numbers, len(EXPECTED))
    # The version comes first in every library; the meaning of the other numbers depends on it.
    for (name, expected), found in zip(EXPECTED.items(), numbers, strict=True):
        if found != expected:
            raise BuildError(
                f"the compiled kernels have another interface: {name} {found}, must be {expected}"
            )
    if count != len(EXPECTED):
        raise BuildError(f"the compiled kernels state {count} numbers, must be {len(EXPECTED)}")


class Kernels:
    """One loaded library. Its functions release the GIL while they run."""

    def __init__(self, library: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            raise BuildError(f"the compiled kernels do not load: {error}") from None
        check_interface(loaded)
        self.library = library
        loaded.tandem_block.restype = _INTEGER
        self.block: int = loaded.tandem_block()
        """Outputs of a linear layer that are packed side by side."""
        i = _INTEGER
        p = _POINTER
        self._replay = _function(loaded.tandem_replay, i, p, i)
        self._probabilities = _function(loaded.tandem_probabilities, None, p, i, i, i, p, p, i)
        self._sample = _function(loaded.tandem_sample, None, p, i, i, p, p, p, i)
        self._topk = _function(loaded.tandem_topk, None, p, i, i, i, i, p, p, i)

    def linear(
        self,
        inputs: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        output_width: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply inputs [..., input_width] by packed weights (`layers.packed`) and add a float32 bias [output_width].
        Sums are kept in float32; `dtype` is that of the results, by default that of the inputs."""
        outputs = inputs.new_empty((*inputs.shape[:-1], output_width), dtype=dtype)
        self.run(linear_call(inputs.contiguous(), weights, bias, outputs))
        return outputs

    def run(self, *calls: KernelCall) -> None:
        self.join(calls)()

    def join(self, calls: SequenceOf[KernelCall]) -> Callable[[], None]:
        """Join calls into one without arguments, valid while their tensors live. An IndexError says that a look-up is
        out of its table's range."""
        steps = (RoutineCall * len(calls))(
            *(RoutineCall(call.routine, ctypes.addressof(call.arguments)) for call in calls)
        )
        return partial(self._run, ctypes.addressof(steps), len(calls), (steps, calls))

    def _run(self, address: int, count: int, kept: object) -> None:
        """`kept` holds what the library knows by address."""
        if self._replay(address, count) != count:
            raise IndexError("an id is not in the table that is looked up")

    def probabilities(self, logits: Tensor, temperatures: SequenceOf[float]) -> Tensor:
        """The softmax of logits [R, V] divided by temperatures above 0, float64 [R, V], to the last places."""
        logits = logits.contiguous()
        rows, width = logits.shape
        probs = torch.empty(rows, width, dtype=torch.float64)
        divisors = (ctypes.c_double * rows)(*temperatures)
        self._probabilities(
            logits.data_ptr(), kind_of(logits.dtype), rows, width, divisors, probs.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        return probs

    def sample(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Sample as `tandem.model.sampling.noise.sample` does: probs float64 [R, V], keys int64 [R]; 0 for a row of
        zeros."""
        probs = probs.contiguous()
        keys = keys.contiguous()
        token_ids = None if token_ids is None else token_ids.contiguous()
        samples = torch.empty(probs.shape[0], dtype=torch.int64)
        self._sample(
            probs.data_ptr(), probs.shape[0], probs.shape[1], keys.data_ptr(),
            None if token_ids is None else token_ids.data_ptr(), samples.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return samples

    def topk(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest numbers of each row, descending, float32 [R, count], and their columns; ties go to the lowest."""
        values = values.contiguous()
        rows, width = values.shape
        found = torch.empty(rows, count, dtype=torch.float32)
        columns = torch.empty(rows, count, dtype=torch.int64)
        self._topk(
            values.data_ptr(), kind_of(values.dtype), rows, width, count, found.data_ptr(), columns.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return found, columns


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype = result
    function.argtypes = arguments
    return function


def linear_call(inputs: Tensor, weights: Tensor, bias: Tensor | None, outputs: Tensor) -> KernelCall:
    """A linear layer, as `Kernels.linear`; inputs and outputs are contiguous."""
    width = outputs.shape[-1]
    call = LinearCall(
        inputs.data_ptr(), kind_of(inputs.dtype), outputs.numel() // width, inputs.shape[-1],
        weights.data_ptr(), kind_of(weights.dtype), None if bias is None else bias.data_ptr(), outputs.data_ptr(),
        kind_of(outputs.dtype), width, torch.get_num_threads(),
    )  # fmt: skip
    return KernelCall(Routine.LINEAR, call)

"""Arguments of the kernels: the structures of the C++ headers, field by field."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

_POINTER: Final = ctypes.c_void_p
_INTEGER: Final = ctypes.c_int64

_KINDS = {torch.float32: 0, torch.bfloat16: 1}

DTYPES = frozenset(_KINDS)
"""Data type in which the kernels compute."""

INT64_KIND = 2
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
    """`struct Attention` of attention.h."""

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


class Routine(IntEnum):
    """`enum Routine` of kernels.cpp."""

    LINEAR = 0
    ATTEND = 1
    POINTWISE = 2
    MEAN = 3
    GATHER = 4


class Operation(IntEnum):
    """`enum Operation` of pointwise.h."""

    COPY = 0
    NEGATE = 1
    SQUARE = 2
    RECIPROCAL_ROOT = 3
    SILU = 4
    ADD = 5
    MULTIPLY = 6


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One run of a kernel. Its owner must keep the memory alive that it refers to."""

    routine: Routine
    arguments: ctypes.Structure


class RoutineCall(ctypes.Structure):
    """`struct Call` of kernels.cpp."""

    _fields_ = (("routine", _INTEGER), ("arguments", _POINTER))

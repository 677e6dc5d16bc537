"""The interface between Python and a compiled library, compared when the library is loaded.

Structures and enumerations are declared twice, in the C++ sources and in `calls`. A library that was compiled from
other sources would read the wrong memory, so each library states its interface, and a library with another one is
not used.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from tandem.engine.backends.cpu_native.library.build import BuildError
from tandem.engine.backends.cpu_native.library.calls import (
    DIMENSIONS,
    DTYPES,
    AttentionCall,
    GatherCall,
    LinearCall,
    MeanCall,
    Operand,
    Operation,
    PointwiseCall,
    Routine,
    RoutineCall,
)

VERSION: Final = 5
"""`INTERFACE_VERSION` of kernels.cpp. It rises with every change of a structure, an enumeration, or a
function's name or arguments."""

EXPECTED: Final = {
    "interface version": VERSION,
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
    """Compare a loaded library's numbers with `EXPECTED`.

    Raises:
        BuildError: the library states other numbers, or none.
    """
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

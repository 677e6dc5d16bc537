"""Finds the compiled kernels that a wheel or an image brings along."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

from tandem.engine.backends.cpu_native.library.build import OBJECTS, TARGETS

_CPU_DESCRIPTION: Final = Path("/proc/cpuinfo")

_V3: Final = frozenset(
    ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm",
     "movbe", "xsave")
)  # fmt: skip
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_NEEDED: Final = {"x86-64-v3": _V3, "avx512": _V4, "avx512-bf16": _V4 | {"avx512_bf16"}}
"""Flags of a processor, in Linux's spelling, by target. The levels are those of the x86-64 psABI."""


def bundled_kernels(folder: Path = OBJECTS, flags: frozenset[str] | None = None) -> Path | None:
    """The fastest library of a folder that a processor can run.

    Args:
        folder: has a file NAME.so for some of `TARGETS`.
        flags: of the processor, as /proc/cpuinfo spells them; None for this machine's.

    Returns:
        None where there is none, as in a checkout or on a processor that is not x86-64.
    """
    flags = _flags() if flags is None else flags
    for target in reversed(TARGETS):
        library = folder / f"{target}.so"
        if _NEEDED[target] <= flags and library.is_file():
            return library
    return None


def _flags() -> frozenset[str]:
    if platform.machine() != "x86_64" or not _CPU_DESCRIPTION.is_file():
        return frozenset()
    for line in _CPU_DESCRIPTION.read_text().splitlines():
        name, _, words = line.partition(":")
        if name.strip() == "flags":
            return frozenset(words.split())
    return frozenset()

"""Lets torch's CPU wheel make fake tensors on the device `cuda`.

torch asks a device guard which device is current whenever it makes a tensor, and a CPU wheel has none for CUDA. Here a
guard that does nothing is compiled and loaded. Tensors that are not fake cannot be made all the same.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

_SOURCE = """\
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
"""


def reason_to_skip() -> str | None:
    """Why there can be no fake CUDA here; None if there can."""
    if torch.version.cuda is not None or torch.cuda.is_available():
        return "torch has CUDA itself"
    return None if _compiler() else "there is no C++ compiler"


@cache
def register(folder: Path) -> None:
    """Compiles the guard into the folder, some 1.5 s, and registers it for the rest of the process."""
    torch_folder = Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_SOURCE)
    compiler = _compiler()
    assert compiler is not None
    command = [
        compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(source), "-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"the device guard does not compile: {done.stderr[-500:]}")
    ctypes.CDLL(str(library))


def _compiler() -> str | None:
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)

"""The compiled kernels in the wheels that tests build."""

from __future__ import annotations

import platform
import shutil

CAN_COMPILE = platform.machine() == "x86_64" and shutil.which("c++") is not None

TARGET = "x86-64-v3"
"""One of three processors, because compilers are slow. Every faster processor runs its kernels as well."""

ENVIRONMENT = {"TANDEM_WHEEL_KERNELS": TARGET if CAN_COMPILE else ""}
"""Environment that chooses the kernels for the build of a wheel."""

PLACES = [f"tandem/engine/backends/cpu_native/library/objects/{TARGET}.so"] if CAN_COMPILE else []
"""The files of the kernels in a wheel."""

"""The compiled kernels in the wheels that tests build."""

from __future__ import annotations

import platform
import shutil

CAN_COMPILE = platform.machine() == "x86_64" and shutil.which("c++") is not None

TARGET = "x86-64-v3"
"""One processor of three, because compilers are slow. Whatever runs a faster one's kernels runs these, too."""

ENVIRONMENT = {"TANDEM_WHEEL_KERNELS": TARGET if CAN_COMPILE else ""}
"""Tells the build of a wheel which kernels to compile."""

PLACES = [f"tandem/engine/backends/cpu_native/library/objects/{TARGET}.so"] if CAN_COMPILE else []
"""Their files in a wheel."""

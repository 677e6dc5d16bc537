"""Facts about a device."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.figures import DeviceFacts

_READ_BYTES = 1 << 30


def synchronized(device: torch.device) -> None:
    """Waits until the device has done what it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_milliseconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median milliseconds of a piece of work, after two runs that are not counted."""
    taken = []
    for number in range(rounds + 2):
        synchronized(device)
        began = time.perf_counter()
        work()
        synchronized(device)
        if number >= 2:
            taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def device_facts(device: torch.device, rounds: int) -> DeviceFacts:
    """Measures how fast the device reads, and asks it for the rest."""
    rate = _read_rate(device, rounds)
    if device.type != "cuda":
        return DeviceFacts(
            name=platform.processor() or platform.machine(),
            memory_bytes=0,
            compute_capability="",
            torch_version=torch.__version__,
            cuda_version="",
            driver_version="",
            read_bytes_per_second=rate,
        )
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        torch_version=torch.__version__,
        cuda_version=str(torch.version.cuda or ""),
        driver_version=_driver_version(),
        read_bytes_per_second=rate,
    )


def _read_rate(device: torch.device, rounds: int) -> float:
    count = _READ_BYTES if device.type == "cuda" else _READ_BYTES // 16
    numbers = torch.ones(count // 4, device=device)
    return 1e3 * count / median_milliseconds(numbers.sum, device, rounds)


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.partition("\n")[0].strip()

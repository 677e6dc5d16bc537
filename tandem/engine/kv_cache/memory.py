"""How much memory the KV cache may take."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_CGROUP_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_DEFAULT_UTILIZATION_ACCELERATOR = 0.9
_DEFAULT_UTILIZATION_CPU = 0.3
_MARGIN_BYTES = 256 << 20
"""Free memory of an accelerator that is left alone: other processes' use of it changes from moment to moment."""
_GIB = 1 << 30


def memory_allowance(utilization: float | None, device: torch.device) -> int:
    """Bytes that the KV cache may take, now that the weights are loaded; 0 or less when there is no room for it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading no longer needs
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        share = _DEFAULT_UTILIZATION_ACCELERATOR if utilization is None else utilization
        if (sentence := shortfall(total, free, own, share)) is not None:
            logger.warning(sentence, extra={"device": str(device)})
        return accelerator_allowance(total, free, own, share)
    share = _DEFAULT_UTILIZATION_CPU if utilization is None else utilization
    page = os.sysconf("SC_PAGE_SIZE")
    total = min(os.sysconf("SC_PHYS_PAGES") * page, _cgroup_memory_limit())
    return int(total * share) - _resident_bytes()


def accelerator_allowance(total: int, free: int, own: int, share: float) -> int:
    """Bytes for the KV cache of a process that may take a share of an accelerator which others use as well.

    Args:
        total: the accelerator's memory.
        free: what no process holds at the moment.
        own: what this process holds already.
        share: the part of `total` that this process may hold, its weights included.
    """
    return min(_promised(total, own, share), free - _MARGIN_BYTES)


def shortfall(total: int, free: int, own: int, share: float) -> str | None:
    """A sentence for the log when less is free than the share promises; see `accelerator_allowance`."""
    promised, available = _promised(total, own, share), free - _MARGIN_BYTES
    if promised <= available:
        return None
    fits = max(own + available, 0) / total
    return (
        f"device_memory_utilization is {share:g}, which leaves {promised / _GIB:.1f} GiB for the KV cache, but of the "
        f"device's {total / _GIB:.1f} GiB only {free / _GIB:.1f} GiB are free; the cache takes "
        f"{max(available, 0) / _GIB:.1f} GiB, as with {int(fits * 100) / 100:g}"
    )


def _promised(total: int, own: int, share: float) -> int:
    return int(total * share) - own


def _cgroup_memory_limit() -> int:
    """Memory limit of the container, which the machine's own figure does not show."""
    for path in _CGROUP_MEMORY_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return 1 << 62


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0

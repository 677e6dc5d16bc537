"""Holds processes to a part of a core each, by Linux control groups: on few cores, workers that have room to grow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000
"""Microseconds that a quota is for. By the kernel's default of 100,000 a worker would stand still for most of them."""


@contextmanager
def held_to(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Let each process use so many cores for as long as the block lasts.

    Args:
        pids: The processes, with all of their threads. Those that they start later share their quota.
        cores: Such as 0.25.

    Raises:
        OSError: this needs Linux, control groups for the processor, and the right to make one.
    """
    hierarchy = _hierarchy()
    made: list[Path] = []
    try:
        for pid in pids:
            group = hierarchy / f"tandem-benchmark-{os.getpid()}-{pid}"
            group.mkdir()
            made.append(group)
            _limit(group, round(cores * _PERIOD_US))
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        yield
    finally:
        for group in made:
            _move_back(group, hierarchy)
            group.rmdir()


def _hierarchy() -> Path:
    """Where groups with a quota of the processor are made."""
    first_version = _ROOT / "cpu"
    return first_version if first_version.is_dir() else _ROOT


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}", encoding="ascii")
    else:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")


def _move_back(group: Path, hierarchy: Path) -> None:
    """A group must be empty to be removed."""
    for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
        (hierarchy / "cgroup.procs").write_text(pid, encoding="ascii")

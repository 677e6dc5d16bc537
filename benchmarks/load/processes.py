"""Resources that a process and its children have used, as the system counts them."""

from __future__ import annotations

import os
from pathlib import Path


def processor_seconds(pid: int) -> float:
    """Processor time of a process and of the children that run now."""
    return sum(map(_own_seconds, tree(pid)))


def resident_mebibytes(pid: int) -> list[float]:
    """Resident memory of a process and of each of its children, the largest first."""
    page = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return sorted((page * int(_read(each, "statm").split()[1]) for each in tree(pid)), reverse=True)


def tree(pid: int) -> list[int]:
    """A process, its children, their children and so on."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found.extend(parents.get(each, ()))
    return found


def _own_seconds(pid: int) -> float:
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(pid: int) -> list[str]:
    """Fields of a process's stat after its name; none when it has ended."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    try:
        return (Path("/proc") / str(pid) / name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

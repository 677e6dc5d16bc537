"""A coordinator before two scripted services, as processes, and what processes take of the machine."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import process

RULES = ("greedy", "strict", "residual", "block")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes that run."""

    address: str
    """Of the coordinator."""
    pids: Mapping[str, int]
    """Processes by name: coordinator, target, draft, and clients for this one."""
    metrics_url: str
    """Empty where no metrics are collected."""
    http_url: str
    """Of the coordinator over HTTP; empty where it does not listen there."""


@asynccontextmanager
async def cluster(
    rule: str,
    options: argparse.Namespace,
    *,
    has_metrics: bool = False,
    has_http: bool = False,
    more: Sequence[str] = (),
) -> AsyncIterator[Cluster]:
    """Run a coordinator under a rule before a scripted target and a scripted draft.

    Args:
        rule: Acceptance rule of requests above temperature 0; greedy: the coordinator's default.
        options: `workers`, `stream_interval`, `num_speculative_tokens`, `acceptance`, `verify_ms` and `draft_ms`.
        has_metrics: Whether the coordinator collects metrics, which costs it a little.
        has_http: Whether the coordinator also listens for HTTP.
        more: Further options of the coordinator.
    """
    async with AsyncExitStack() as stack:
        (target, target_pid), (draft, draft_pid) = [
            await stack.enter_async_context(
                process(
                    "benchmarks.load.scripted_services",
                    *("--role", role, "--step-ms", str(step), "--acceptance", str(options.acceptance)),
                )
            )
            for role, step in (("target", options.verify_ms), ("draft", options.draft_ms))
        ]
        port = free_port() if has_metrics else None
        http_port = free_port() if has_http else None
        address, pid = await stack.enter_async_context(
            process(
                "coordinator",
                *("--target-address", target, "--draft-address", draft),
                *("--num-speculative-tokens", str(options.num_speculative_tokens)),
                *("--speculation-policy", "fixed", "--draft-ahead", "off"),
                *(() if rule == "greedy" else ("--rejection-sampling-strategy", rule)),
                *("--workers", str(options.workers), "--stream-interval", str(options.stream_interval)),
                *(() if port is None else ("--prometheus-port", str(port))),
                *(() if http_port is None else ("--http-port", str(http_port))),
                *more,
            )
        )
        yield Cluster(
            address,
            {"coordinator": pid, "target": target_pid, "draft": draft_pid, "clients": os.getpid()},
            "" if port is None else f"http://127.0.0.1:{port}/metrics",
            "" if http_port is None else f"http://127.0.0.1:{http_port}",
        )


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


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


_PERIOD_US = 10_000
"""Microseconds that a quota is for. By the kernel's default of 100,000 a worker would stand still for most of them."""


@contextmanager
def held_to(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Let each process use so many cores for as long as the block lasts, by Linux control groups.

    Args:
        pids: The processes, with all of their threads. Those that they start later share their quota.
        cores: Such as 0.25.

    Raises:
        OSError: this needs Linux, control groups for the processor, and the right to make one.
    """
    root = Path("/sys/fs/cgroup")
    hierarchy = (
        root / "cpu" if (root / "cpu").is_dir() else root
    )  # the first version has one for each resource
    quota = round(cores * _PERIOD_US)
    made: list[Path] = []
    try:
        for pid in pids:
            group = hierarchy / f"tandem-benchmark-{os.getpid()}-{pid}"
            group.mkdir()
            made.append(group)
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}", encoding="ascii")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
                (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        yield
    finally:
        for group in made:  # each must be empty to be removed
            for held in (group / "cgroup.procs").read_text(encoding="ascii").split():
                (hierarchy / "cgroup.procs").write_text(held, encoding="ascii")
            group.rmdir()

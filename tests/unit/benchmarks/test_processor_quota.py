"""A worker that is held to a part of a core is in a control group with that quota, and only for so long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load.__main__ import workers_of
from benchmarks.load.processor_quota import held_to


def _group_of(pid: int) -> Path | None:
    """The group that was made for a process, if it is in one."""
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "tandem-benchmark" in path:
            return Path("/sys/fs/cgroup", "cpu" if controllers else "", path.lstrip("/"))
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_process_is_held_for_as_long_as_the_block_lasts() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            with held_to([process.pid], 0.25):
                group = _group_of(process.pid)
                assert group is not None
                quota = [path for name in ("cpu.max", "cpu.cfs_quota_us") if (path := group / name).exists()]
                assert quota[0].read_text(encoding="ascii").split()[0] == "2500"
            assert _group_of(process.pid) is None
            assert not group.exists()
        except OSError as error:
            pytest.skip(f"no control group for the processor may be made here: {error}")
        finally:
            process.kill()


def test_a_coordinator_without_children_does_its_own_work() -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert workers_of(process.pid) == [process.pid]
        assert process.pid in workers_of(os.getpid())
        process.kill()

"""Start a command in a container, or in one that runs: what a container engine does, with the kernel's own calls.

Run as root, by itself, with the description of the container as JSON: `containers.py` makes it. Own mounts under an own
root, an own network behind a bridge, a user without a single capability, no new privileges.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
_LAST_CAPABILITY = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: Any) -> None:
    given = [value.encode() if isinstance(value, str) else value for value in arguments]
    if getattr(_libc, function)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}{arguments}: {os.strerror(number)}")


def _mount(source: str, at: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    _call("mount", source, str(at), kind, ctypes.c_ulong(flags), options)


def start(container: dict[str, Any]) -> NoReturn:
    """Become the container's command."""
    _call("unshare", CLONE_NEWNS | CLONE_NEWNET)
    _join_bridge(container["network"])
    _mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    root = Path(container["root"])
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for place, text in container["files"].items():
        path = _inside(root, place)
        path.write_text(text, encoding="utf-8")
    for place, target in container["links"].items():
        _inside(root, place).symlink_to(target)
    for source, place in container["binds"].items():
        _bind(Path(source), _inside(root, place), is_writable=place in container["writable"])
    for place in ("/proc", "/dev", "/sys"):
        (root / place[1:]).mkdir(exist_ok=True)
        _mount(place, root / place[1:], None, MS_BIND | MS_REC)
    for place, options in container["tmpfs"].items():
        path = _inside(root, place)
        path.mkdir(exist_ok=True)
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)
    if container["read_only"]:
        _mount("tmpfs", root, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    os.chroot(root)
    _become(container)


def run_in(container: dict[str, Any], pid: int) -> NoReturn:
    """Become a further command in the container whose first process is `pid`."""
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    for kind, flag in (("net", CLONE_NEWNET), ("mnt", CLONE_NEWNS)):
        _call("setns", os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), flag)
    os.fchdir(root)
    os.chroot(".")
    _become(container)


def _become(container: dict[str, Any]) -> NoReturn:
    os.chdir(container["workdir"])
    for capability in range(_LAST_CAPABILITY + 1):
        _call("prctl", PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    os.setgroups([])
    os.setresgid(*[container["gid"]] * 3)
    os.setresuid(*[container["uid"]] * 3)
    _call("prctl", PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
    # A change of user clears it, so it comes last: no container outlives the tests.
    _call("prctl", PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    os.execvpe(container["command"][0], container["command"], container["environment"])


def _inside(root: Path, place: str) -> Path:
    """The place under the container's root; its folder is made."""
    path = root / place.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _bind(source: Path, at: Path, *, is_writable: bool) -> None:
    if source.is_dir():
        at.mkdir(exist_ok=True)
    else:
        at.touch()
    _mount(str(source), at, None, MS_BIND | MS_REC)
    flags = 0 if is_writable else MS_RDONLY
    _mount(str(source), at, None, MS_REMOUNT | MS_BIND | MS_NOSUID | flags)


def _join_bridge(network: dict[str, Any]) -> None:
    """An eth0 with this container's address; its other end hangs on the bridge in the network's namespace."""
    end = f"v{network['number']}"
    pair = f"link add {end} type veth peer name eth0 netns {os.getpid()}"
    bridge = f"link set {end} master {network['bridge']} up"
    _ip(["nsenter", "--target", str(network["pid"]), "--net"], f"{pair}\n{bridge}")
    _ip([], f"addr add {network['address']}/24 dev eth0\nlink set eth0 up\nlink set lo up")


def _ip(prefix: list[str], commands: str) -> None:
    subprocess.run([*prefix, "ip", "-batch", "-"], input=commands, text=True, check=True)


if __name__ == "__main__":
    description = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if len(sys.argv) > 2:
        run_in(description | {"command": sys.argv[3:]}, int(sys.argv[2]))
    start(description)

"""Services of a compose file as containers, without a container engine: Linux and root are enough.

What compose and the Dockerfile say is done: the very command, environment, user, mounts, read-only root and names.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.images import PYTHON, VENV, Image
from tests.end_to_end.processes import START_SECONDS, Process, running, until
from tests.paths import ROOT

_LINKER = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", *_LINKER)
_PREFIX = "10.77.0"
TEST_OPTIONS = ROOT / "tests" / "deploy" / "tandem.env"
"""Options of the services for all of these tests, for the variable OPTIONS_FILE."""


def why_not() -> str:
    """Why containers cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "containers are made with Linux namespaces, by root"
    missing = [tool for tool in ("unshare", "nsenter", "setpriv", "ip") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    trial = ["unshare", "--mount", "--net", "ip", "link", "add", "tandem0", "type", "bridge"]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """A network of its own, in which every container has an address and is found by its names."""

    def __init__(self, pid: int, hosts: Path) -> None:
        self.pid = pid
        self.hosts = hosts
        """Each container's /etc/hosts."""
        self._numbers = itertools.count(2)
        self._names = {"127.0.0.1": ["localhost"]}
        self._tell()

    def take(self) -> tuple[int, str]:
        """A number and an address that nobody has."""
        number = next(self._numbers)
        return number, f"{_PREFIX}.{number}"

    def add(self, address: str, names: list[str]) -> None:
        """Let this address be found under these names, beside those that have them already."""
        self._names[address] = names
        self._tell()

    def remove(self, address: str) -> None:
        del self._names[address]
        self._tell()

    def _tell(self) -> None:
        # In place: the containers have mounted this very file.
        lines = (f"{address} {' '.join(names)}\n" for address, names in self._names.items())
        self.hosts.write_text("".join(lines), encoding="utf-8")


_BRIDGE = f"""set -e
ip -batch - <<END
link add br0 type bridge
addr add {_PREFIX}.1/24 dev br0
link set br0 up
link set lo up
END
echo up
exec cat
"""
"""A bridge, which is there until stdin ends."""


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", _BRIDGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as bridge:
        assert bridge.stdout is not None
        assert bridge.stdout.readline() == b"up\n"
        yield Network(bridge.pid, folder / "hosts")


_START = """set -e
mount --bind {root} {root}
mount --all --fstab {root}.fstab
{protect}
nsenter --target {net} --net ip -batch - <<END
link add v{number} type veth peer name eth0 netns $$
link set v{number} master br0 up
END
ip -batch - <<END
addr add {address}/24 dev eth0
link set eth0 up
link set lo up
END
exec /usr/sbin/chroot {root} "$@"
"""
"""Its own mounts and network, whose other end hangs on the bridge, and then the command."""


@dataclass(frozen=True)
class Container:
    name: str
    process: Process
    address: str
    entry: list[str]
    """Words that precede a command in the container: its environment, and a user without a single capability."""
    health_check: list[str]
    ready: str

    def run(self, *command: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker compose exec` does."""
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--net", "--root"]
        words = [*enter, *self.entry, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)

    def health(self) -> int:
        """The exit code of its health check."""
        return self.run(*self.health_check).returncode

    def wait_until_healthy(self) -> None:
        """Wait until it says that it is ready, which is cheaper than asking; its health check must then agree."""
        process = self.process
        until(lambda: self.ready in process.stdout + process.stderr or process.has_ended, START_SECONDS)
        check = self.run(*self.health_check)
        assert check.returncode == 0, f"{self.name}: {check.stdout}{check.stderr}\n{process.story}"


def _mounts(root: Path, name: str, service: Mapping[str, Any], image: Image, net: Network) -> Iterator[str]:
    """Lines of an fstab for a container under this root, where the places are made."""
    binds = {str(path): (place, "ro") for place, path in image.files.items()}
    for volume in service.get("volumes", []):
        source, place, mode = volume.split(":")
        if source.startswith((".", "/")):
            assert mode == "ro", f"{name} may write to {source}"
            binds[str((ROOT / source).resolve())] = (place, mode)
        else:
            binds[str(_named_volume(root.parent / source))] = (place, mode)
    for place in _SYSTEM:
        if Path(place).is_symlink():
            (root / place[1:]).symlink_to(os.readlink(place))
        elif Path(place).exists():
            binds[place] = (place, "ro")
    binds |= {sys.base_prefix: (sys.base_prefix, "ro"), str(net.hosts): ("/etc/hosts", "ro")}
    binds |= {place: (place, "rw") for place in ("/proc", "/dev", "/sys")}
    for source, (place, mode) in binds.items():
        at = root / place[1:]
        at.parent.mkdir(parents=True, exist_ok=True)
        if Path(source).is_dir():
            at.mkdir(exist_ok=True)
        else:
            at.touch()
        yield f"{source} {at} none rbind,{mode},nosuid 0 0\n"
    for entry in service.get("tmpfs", []):
        place, options = entry.split(":")
        at = root / place[1:]
        at.mkdir(parents=True, exist_ok=True)
        yield f"tmpfs {at} tmpfs nosuid,nodev,{options} 0 0\n"


def _named_volume(folder: Path) -> Path:
    """The folder of a volume that containers share, which their user owns."""
    if not folder.exists():
        folder.mkdir(mode=0o700)
        os.chown(folder, 10001, 10001)
    return folder


def _environment(service: Mapping[str, Any], image: Image) -> dict[str, str]:
    """The image's variables, those of the service's files, and its own, each stronger than those before."""
    found = dict(image.environment)
    for path in (ROOT / file["path"] for file in service.get("env_file", [])):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    own = {name: str(value) for name, value in service.get("environment", {}).items() if value is not None}
    return found | own | {"PATH": found["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")}


@contextmanager
def container(
    name: str, service: Mapping[str, Any], image: Image, net: Network, folder: Path
) -> Iterator[Container]:
    names = [name]
    if isinstance(networks := service.get("networks"), dict):
        names += [alias for settings in networks.values() for alias in (settings or {}).get("aliases", [])]
    number, address = net.take()
    root = folder / f"{name}-{number}"
    files = {
        f"{VENV}/pyvenv.cfg": f"home = {sys.base_prefix}/bin\n",
        "/etc/nsswitch.conf": "hosts: files\n",
        "/etc/host.conf": "multi on\n",
    }
    for place, text in files.items():
        (root / place[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / place[1:]).write_text(text, encoding="utf-8")
    (root / VENV[1:] / "bin").mkdir()
    (root / VENV[1:] / "bin" / "python").symlink_to(f"{sys.base_prefix}/bin/{PYTHON}")
    root.with_suffix(".fstab").write_text("".join(_mounts(root, name, service, image, net)), encoding="utf-8")
    protect = f"mount -o remount,bind,ro {root}" if service.get("read_only") else ""
    script = _START.format(root=root, protect=protect, net=net.pid, number=number, address=address)
    uid, gid = service.get("user", image.user).split(":")
    variables = [f"{key}={value}" for key, value in _environment(service, image).items()]
    entry = [
        *("/usr/bin/env", "-i", f"--chdir={image.workdir}", *variables),
        *("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"),
        *("--bounding-set=-all", "--no-new-privs", "--pdeathsig=KILL"),
    ]
    command = [*service.get("entrypoint", image.entrypoint), *service.get("command", [])]
    with running("unshare", "--mount", "--net", "bash", "-c", script, "bash", *entry, *command) as process:
        net.add(address, names)
        try:
            yield Container(name, process, address, entry, service["healthcheck"]["test"][1:], image.ready)
        finally:
            net.remove(address)


class Cluster(dict[str, Container]):
    """The containers of a compose file, by the names of their services."""

    def __init__(
        self, wanted: Mapping[str, Mapping[str, Any]], images: Mapping[str, Image], folder: Path
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._images = images
        self._folder = folder
        self._stack = ExitStack()
        self._net: Network | None = None

    def __enter__(self) -> Cluster:
        """Start each service once those that it depends on are healthy, and wait until all are."""
        try:
            self._net = self._stack.enter_context(network(self._folder))
            healthy: set[str] = set()
            while waiting := [name for name in self._wanted if name not in self]:
                for name in waiting:
                    if (needed := self._wanted[name]["depends_on"]).keys() <= self.keys():
                        for other in needed.keys() - healthy:
                            self[other].wait_until_healthy()
                        healthy |= needed.keys()
                        self[name] = self.another(name)
            for name in self.keys() - healthy:
                self[name].wait_until_healthy()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        self._stack.close()

    def another(self, name: str) -> Container:
        """One more container of a service, as `--scale` makes it; the others find it under the same name."""
        assert self._net is not None
        service = self._wanted[name]
        image = self._images[service["build"]["target"]]
        return self._stack.enter_context(container(name, service, image, self._net, self._folder))

"""Services of a compose file as containers, without a container engine: Linux and root are enough.

What compose and the Dockerfile say is done: the very command, environment, user, mounts, read-only root and names.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.images import PYTHON, VENV, Image
from tests.end_to_end.processes import START_SECONDS, Process, running, until
from tests.paths import ROOT

_ENTER = str(Path(__file__).with_name("enter.py"))
_BRIDGE = str(Path(__file__).with_name("bridge.py"))
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
)
_PREFIX = "10.77.0"


TEST_OPTIONS = ROOT / "tests" / "deploy" / "tandem.env"
"""Options of the services for all of these tests, for the variable OPTIONS_FILE."""


def why_not() -> str:
    """Why containers cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "containers are made with Linux namespaces, by root"
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    trial = ["unshare", "--mount", "--net", "ip", "link", "add", "tandem0", "type", "bridge"]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """A network of its own, in which every container has an address and is found by its names."""

    def __init__(self, pid: int, names: Path) -> None:
        self.pid = pid
        self._file = names
        self._numbers = itertools.count(2)
        self._names: dict[str, list[str]] = {}

    def take(self) -> tuple[int, str]:
        """A number and an address that nobody has."""
        number = next(self._numbers)
        return number, f"{_PREFIX}.{number}"

    def add(self, address: str, names: Iterable[str]) -> None:
        """Let this address be found under these names, beside those that have them already."""
        for name in names:
            self._names.setdefault(name, []).append(address)
        self._tell()

    def remove(self, address: str) -> None:
        self._names = {
            name: [other for other in addresses if other != address]
            for name, addresses in self._names.items()
        }
        self._tell()

    def _tell(self) -> None:
        # Replaced at once: the server never reads a half.
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._names), encoding="utf-8")
        new.replace(self._file)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    names = folder / "names.json"
    names.write_text("{}", encoding="utf-8")
    with subprocess.Popen(
        ["unshare", "--net", sys.executable, _BRIDGE, f"{_PREFIX}.1", str(names)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as bridge:
        assert bridge.stdout is not None
        assert bridge.stdout.readline() == b"up\n"
        yield Network(bridge.pid, names)


class Container:
    def __init__(self, name: str, process: Process, description: Path, address: str) -> None:
        self.name = name
        self.process = process
        self.address = address
        self._description = description
        described = json.loads(description.read_text(encoding="utf-8"))
        self._health_check: list[str] = described["health_check"]
        self._ready: str = described["ready"]

    def run(self, *command: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker compose exec` does."""
        words = [sys.executable, _ENTER, str(self._description), str(self.process.pid), *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)

    def health(self) -> int:
        """The exit code of its health check."""
        return self.run(*self._health_check).returncode

    def wait_until_healthy(self) -> None:
        """Wait until it says that it is ready, which is cheaper than asking; its health check must then agree."""
        process = self.process
        until(lambda: self._ready in process.stdout + process.stderr or process.has_ended, START_SECONDS)
        check = self.run(*self._health_check)
        assert check.returncode == 0, f"{self.name}: {check.stdout}{check.stderr}\n{process.story}"


def describe(
    name: str, service: Mapping[str, Any], image: Image, net: Network, root: Path
) -> tuple[dict[str, Any], str]:
    """Return the description of a service for `enter.py`, and the container's address."""
    number, address = net.take()
    uid, gid = (int(word) for word in service.get("user", image.user).split(":"))
    environment = image.environment | {
        variable: str(value)
        for variable, value in service.get("environment", {}).items()
        if value is not None
    }
    environment["PATH"] = environment["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
    binds = {str(path): place for place, path in image.files.items()}
    writable = []
    for volume in service.get("volumes", []):
        source, place, mode = volume.split(":")
        assert mode in ("ro", "rw"), f"{name} may write to {source}"
        binds[str((ROOT / source).resolve())] = place
        writable += [place] if mode == "rw" else []
    real = {place: Path(place) for place in _SYSTEM if Path(place).exists()}
    binds |= {str(path): place for place, path in real.items() if not path.is_symlink()}
    binds |= {sys.base_prefix: sys.base_prefix}
    return {
        "root": str(root),
        "command": [*service.get("entrypoint", image.entrypoint), *service.get("command", [])],
        "environment": environment,
        "uid": uid,
        "gid": gid,
        "workdir": image.workdir,
        "health_check": service["healthcheck"]["test"][1:],
        "ready": image.ready,
        "read_only": service.get("read_only", False),
        "tmpfs": dict(entry.split(":") for entry in service.get("tmpfs", [])),
        "binds": binds,
        "writable": writable,
        "links": {place: os.readlink(path) for place, path in real.items() if path.is_symlink()}
        | {f"{VENV}/bin/python": f"{sys.base_prefix}/bin/{PYTHON}"},
        "files": {
            f"{VENV}/pyvenv.cfg": f"home = {sys.base_prefix}/bin\n",
            "/etc/hosts": "127.0.0.1 localhost\n",
            "/etc/nsswitch.conf": "hosts: files dns\n",
            "/etc/resolv.conf": f"nameserver {_PREFIX}.1\n",
        },
        "network": {"pid": net.pid, "bridge": "br0", "number": number, "address": address},
    }, address


def _environment(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the service's variables: those of its files, overridden by those of the compose file."""
    found: dict[str, str] = {}
    for file in service.get("env_file", []):
        if (path := ROOT / file["path"]).exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            found |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return found | {
        name: str(value) for name, value in service.get("environment", {}).items() if value is not None
    }


@contextmanager
def container(
    name: str, service: Mapping[str, Any], image: Image, net: Network, folder: Path
) -> Iterator[Container]:
    names = [name]
    if isinstance(networks := service.get("networks"), dict):
        names += [alias for settings in networks.values() for alias in (settings or {}).get("aliases", [])]
    with ExitStack() as stack:
        number = next(number for number in itertools.count() if not (folder / f"{name}-{number}").exists())
        root = folder / f"{name}-{number}"
        root.mkdir()
        described, address = describe(name, service, image, net, root)
        description = folder / f"{name}-{number}.json"
        description.write_text(json.dumps(described), encoding="utf-8")
        process = stack.enter_context(running(sys.executable, _ENTER, str(description)))
        net.add(address, names)
        stack.callback(net.remove, address)
        yield Container(name, process, description, address)


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
            while waiting := [name for name in self._wanted if name not in self]:
                for name in waiting:
                    if (needed := self._wanted[name]["depends_on"]).keys() <= self.keys():
                        for other in needed:
                            self[other].wait_until_healthy()
                        self[name] = self.another(name)
            for each in self.values():
                each.wait_until_healthy()
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

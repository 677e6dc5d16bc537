"""`tandem up` with real services: they are reached by nobody else, and its own commands reach them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.rpc.addresses import UNIX
from tests.end_to_end.processes import (
    TANDEM,
    Process,
    address_of,
    clean_environment,
    descendants,
    run,
    running,
)
from tests.paths import DEMO_DRAFT, DEMO_TARGET

UP = (TANDEM, "up", "--port", "0", "--http-port", "0")
NOBODY = 65534
"""The user nobody."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`tandem up` over the demo target, and its draft as a model of shorter sequences."""
    shorter = tmp_path_factory.mktemp("up") / "draft"
    shutil.copytree(DEMO_DRAFT, shorter)
    config = json.loads((shorter / "config.json").read_text(encoding="utf-8"))
    (shorter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    with running(*UP, "--target", str(DEMO_TARGET), "--draft", str(shorter)) as process:
        process.line("tandem up: next")
        yield process


def admin(up: Process, *words: str) -> Any:
    ended = run(TANDEM, "admin", *words, "--json", "--address", address_of(up))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def sockets(up: Process) -> dict[str, Path]:
    """The sockets of its services, as the coordinator calls them."""
    replicas = admin(up, "replicas", "list")
    return {each["role"].lower(): Path(each["address"].removeprefix(UNIX)) for each in replicas}


def listening_ports(pids: list[int]) -> set[int]:
    """Ports at which these processes accept connections over a network, loopback included."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def test_only_the_coordinator_has_ports(up: Process) -> None:
    ports = {
        int(address_of(up).rpartition(":")[2]),
        int(re.findall(r"page on http://[^:]+:(\d+)", up.stdout)[0]),
    }
    assert listening_ports(descendants(up.pid)) == ports


def test_its_services_are_behind_a_folder_that_no_other_user_enters(up: Process) -> None:
    by_role = sockets(up)
    assert by_role.keys() == {"target", "draft"}
    for path in by_role.values():
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o777 == 0o700
    if os.getuid() != 0:
        return
    connect = (
        f"import os, socket; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY});"
        f"socket.socket(socket.AF_UNIX).connect({str(by_role['draft'])!r})"
    )
    ended = subprocess.run([sys.executable, "-I", "-c", connect], capture_output=True, text=True, check=False)
    assert "PermissionError: [Errno 13]" in ended.stderr


def test_admin_verbs_go_on_working(up: Process) -> None:
    draft = f"{UNIX}{sockets(up)['draft']}"
    assert admin(up, "replicas", "drain", draft)["state"] == "draining"
    assert admin(up, "replicas", "resume", draft)["state"] == "ready"
    assert not [each for each in admin(up, "doctor")["findings"] if each["severity"] == "problem"]
    answer = run(TANDEM, "generate", "def f(", "--max-tokens", "8", "--address", address_of(up))
    assert answer.returncode == 0, answer.stderr
    checks = run(TANDEM, "doctor", "draft", draft)
    assert checks.returncode == 0, checks.stdout


def test_two_models_of_different_lengths_are_served_with_the_smaller_one(up: Process) -> None:
    assert (
        "tandem up: the target was made for 1024 tokens and the draft for 512; both are started with "
        "--max-length 512\n" in up.stdout
    )
    models = {each["role"]: each["model"] for each in admin(up, "replicas", "list")}
    assert {model["max_length"] for model in models.values()} == {512}


def test_its_folder_goes_when_it_ends() -> None:
    with running(*UP, "--model", "demo", "--draft", "none") as process:
        process.line("tandem up: next")
        folder = sockets(process)["target"].parent
        assert folder.is_dir()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "error: no folder can be made for the services' sockets: no such file or directory"),
        ("x" * 100, "bytes; it must have at most 107: set TMPDIR to a folder with a shorter path\n"),
    ],
)
def test_a_folder_that_cannot_hold_sockets_is_refused_in_a_sentence(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    if name != "missing":
        folder.mkdir()
    script = (
        "import tempfile; from tandem_coordinator.cli.main import main; import sys;"
        f"tempfile.tempdir = {str(folder)!r}; sys.argv = ['tandem', 'up', '--model', 'demo']; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=clean_environment(), check=False
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1

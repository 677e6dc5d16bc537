"""`docker compose` itself builds the images and runs the cluster: up, answer, kill, scale, down.

`make test-compose` asks for it; it takes minutes, and gigabytes of packages where the images are new. Variables of
docker-compose.yml hold here too: TORCH_CPU_INDEX for one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.processes import free_port, until
from tests.paths import ROOT

BUILD_SECONDS = 3600.0
FAILED_START_SECONDS = 180.0
"""Bound on `up` with a model that cannot be loaded."""
PROMPT = "def main():"
MAX_TOKENS = 32

_ASK = """
import sys
from importlib import import_module

import grpc

host, kind = sys.argv[1:]
messages = import_module(f"tandem.v1.{kind}_pb2")
stubs = import_module(f"tandem.v1.{kind}_pb2_grpc")
with grpc.insecure_channel(host) as channel:
    stub = getattr(stubs, f"{kind.title()}ServiceStub")(channel)
    request = getattr(messages, f"{kind.title()}ServiceGetModelInfoRequest")()
    try:
        stub.GetModelInfo(request, timeout=20)
    except grpc.RpcError as error:
        print(error.code().name)
"""
"""Calls a service without its token."""
_KILL = """
import os, pathlib
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    parent = int(stat.read_text().rpartition(")")[2].split()[1])
    if parent == 1:
        os.kill(int(stat.parent.name), 9)
"""
"""Kills the process of a container as a crash would. After `docker kill` Docker would leave the container be."""


def why_not_composed() -> str:
    """Why Compose cannot run a cluster here; empty when it can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    for command in (["info"], ["compose", "version"]):
        done = subprocess.run(["docker", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return f"docker {' '.join(command)} fails: {lines[-1] if lines else done.returncode}"
    return ""


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(why := why_not_composed()), reason=why),
    pytest.mark.timeout(2 * BUILD_SECONDS),
]


class Composed:
    """A project of its own beside others of this machine, on ports that are free."""

    def __init__(self, **variables: str) -> None:
        self.port = free_port()
        self._environment = os.environ | {
            "COMPOSE_PROJECT_NAME": f"tandem-test-{os.getpid()}",
            "IMAGE_TAG": "test",
            "HTTP_PORT": str(self.port),
            "COORDINATOR_PORT": str(free_port()),
            # Threads of several processes that wait for each other by spinning cost more than they give.
            "OPTIONS_FILE": "tests/deploy/tandem.env",
            **variables,
        }

    def run(self, *words: str, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", "compose", *words],
            cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def do(self, *words: str, seconds: float = 600.0) -> str:
        """Run a command that must succeed. What it printed."""
        done = self.run(*words, seconds=seconds)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.run('logs', '--tail', '30').stdout}"
        return done.stdout

    def answer(self) -> str:
        """The text of an answer over HTTP, as a client of this machine gets it."""
        command = [
            "curl",
            "-sS",
            "--fail-with-body",
            "--noproxy",
            "*",
            "-H",
            "content-type: application/json",
        ]
        question = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        done = subprocess.run(
            [*command, "-d", json.dumps(question), url],
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        text: str = json.loads(done.stdout)["choices"][0]["text"]
        return text

    def replicas(self) -> list[dict[str, Any]]:
        words = ("exec", "-T", "coordinator", "tandem", "admin", "replicas", "list", "--output", "json")
        found: list[dict[str, Any]] = json.loads(self.do(*words))
        return found

    def ready(self, role: str) -> int:
        return sum(each["role"] == role and each["state"] == "ready" for each in self.replicas())


@pytest.fixture(scope="module")
def built() -> None:
    Composed().do("build", seconds=BUILD_SECONDS)


@pytest.fixture(scope="module")
def cluster(built: None) -> Iterator[Composed]:
    composed = Composed()
    try:
        composed.do("up", "--detach", "--wait")
        yield composed
    finally:
        composed.do("down", "--volumes")


@pytest.fixture(scope="module")
def text(cluster: Composed) -> str:
    """The answer of the undisturbed cluster."""
    found = cluster.answer()
    assert found.strip()
    return found


def test_the_coordinator_logs_what_to_open(cluster: Composed) -> None:
    logged = cluster.do("logs", "coordinator")
    assert f"http://127.0.0.1:{cluster.port}/v1" in logged
    assert "ready on" in logged


def test_commands_of_the_pages_work(cluster: Composed, text: str) -> None:
    written = cluster.do(
        *("exec", "-T", "coordinator", "tandem", "generate", PROMPT, "--quiet"),
        *("--max-tokens", str(MAX_TOKENS), "--temperature", "0"),
    )
    assert written.strip() == text.strip()
    assert cluster.ready("draft") == cluster.ready("target") == 1


def test_a_service_answers_nobody_without_the_token(cluster: Composed) -> None:
    for host, kind in (("target-service:50052", "target"), ("draft-service:50053", "draft")):
        assert "UNAUTHENTICATED" in cluster.do("exec", "-T", "coordinator", "python", "-c", _ASK, host, kind)


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
def test_a_killed_service_comes_back(cluster: Composed, text: str, service: str) -> None:
    """The process dies, and Docker starts the container again. Meanwhile a request waits, or goes without a draft."""
    container = cluster.do("ps", "--quiet", service).strip()
    started = _inspect(container, ".State.StartedAt")
    # The command may end with the container.
    cluster.run("exec", "-T", service, "python", "-c", _KILL)
    until(lambda: _inspect(container, ".State.StartedAt") != started, 120.0)
    assert cluster.answer() == text
    until(lambda: cluster.ready(service.removesuffix("_service")) == 1, 300.0)
    assert cluster.answer() == text


def _inspect(container: str, field: str) -> str:
    command = ["docker", "inspect", "--format", f"{{{{{field}}}}}", container]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_services_are_scaled_up_and_down(cluster: Composed, text: str) -> None:
    scale = ("--scale", "draft_service=2", "--scale", "target_service=2")
    cluster.do("up", "--detach", "--wait", "--no-recreate", *scale)
    until(lambda: cluster.ready("draft") == cluster.ready("target") == 2, 120.0)
    assert {cluster.answer() for _ in range(4)} == {text}
    cluster.do("up", "--detach", "--no-recreate", "--scale", "draft_service=1", "--scale", "target_service=1")
    until(lambda: cluster.ready("draft") == cluster.ready("target") == 1, 120.0)
    assert cluster.answer() == text


def test_a_stopped_cluster_leaves_nothing(built: None) -> None:
    """After `down` no container is left, and every one has ended by itself."""
    composed = Composed(COMPOSE_PROJECT_NAME=f"tandem-test-{os.getpid()}-down")
    try:
        composed.do("up", "--detach", "--wait")
        composed.do("stop")
        states = [json.loads(line) for line in composed.do("ps", "--all", "--format", "json").splitlines()]
        assert {each["Service"]: each["ExitCode"] for each in states} == {
            "coordinator": 0, "draft_service": 0, "target_service": 0,
        }  # fmt: skip
    finally:
        composed.do("down", "--volumes")
    assert composed.do("ps", "--all", "--quiet") == ""


@pytest.mark.parametrize("words", [("--detach",), ("--detach", "--wait")], ids=" ".join)
def test_a_model_that_cannot_be_loaded_ends_the_start(
    built: None, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """`up` fails in time and names the container, whose log names the model and the reason."""
    models = tmp_path / "models"
    shutil.copytree(ROOT / "models" / "demo", models)
    (models / "target" / "model.safetensors").write_bytes(b"no weights")
    for path in (tmp_path, models):
        path.chmod(0o755)
    composed = Composed(MODELS=str(models), COMPOSE_PROJECT_NAME=f"tandem-test-{os.getpid()}-broken")
    try:
        began = time.monotonic()
        done = composed.run("up", *words)
        assert time.monotonic() - began < FAILED_START_SECONDS
        assert done.returncode != 0
        assert re.search(
            r"dependency failed to start: container \S+-target_service-1 is unhealthy", done.stderr
        )
        assert "error: the file /models/target/model.safetensors is" in composed.do("logs", "target_service")
    finally:
        composed.do("down", "--volumes")

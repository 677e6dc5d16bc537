"""The overlay `cpu`, played out: all of its pods, found by the names of its Services, complete a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.images import Image
from tests.deploy.kubernetes.pods import Namespace
from tests.deploy.kubernetes.rendered import rendered

pytestmark = pytest.mark.soak
"""The same images, probes and limits are played out for compose by `tests/deploy/test_cluster.py`."""

READ = """
import sys, urllib.request
for url in sys.argv[1:]:
    print(urllib.request.urlopen(url).read().decode())
"""
TOKEN = "of-the-tests-alone"


@pytest.fixture(scope="module")
def namespace(
    engine: None, images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Namespace]:
    """All pods, ready in the order in which a cluster would have them: models first, then who looks for them."""
    secrets = {"tandem-admin": {"token": TOKEN.encode()}}
    with Namespace(rendered("cpu"), images, secrets, tmp_path_factory.mktemp("pods")) as running:
        early = running.pods["coordinator"][0]
        assert not early.passes(early.questions[0]), "there is no model yet"
        for name in ("target", "draft", "coordinator"):
            for pod in running.pods[name]:
                running.await_ready(pod)
        yield running


def test_every_pod_is_ready_and_may_do_nothing_but_serve(namespace: Namespace) -> None:
    assert {name: len(pods) for name, pods in namespace.pods.items()} == {
        "coordinator": 2,
        "draft": 1,
        "target": 1,
    }
    for pods in namespace.pods.values():
        for pod in pods:
            assert pod.main.run("touch", "/tmp/new").returncode == 0
            for place in ("/", "/etc", "/opt/tandem", "/models"):
                refused = pod.main.run("touch", f"{place}/new")
                assert refused.returncode == 1, place
            status = Path(f"/proc/{pod.main.process.pid}/status").read_text(encoding="utf-8")
            fields = dict(line.split(":\t", 1) for line in status.splitlines())
            assert set(fields["Uid"].split()) == set(fields["Gid"].split()) == {"10001"}
            assert (int(fields["CapBnd"], 16), fields["NoNewPrivs"]) == (0, "1")


def test_a_prompt_is_completed_by_name_and_by_address(namespace: Namespace) -> None:
    """By the name of the Service, and by the address of one pod: the same text."""
    caller, other = (pod.main for pod in namespace.pods["coordinator"])
    texts = set()
    for host in ("coordinator", other.address):
        command = ("tandem", "generate", "def main():", "--max-tokens", "24", "--temperature", "0", "--json")
        done = caller.run(*command, "--address", f"{host}:50051")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["speculation"]["accepted"] > 0
        texts.add(answer["text"])
    assert len(texts) == 1


def test_http_and_metrics_answer_at_the_ports_of_the_services(namespace: Namespace) -> None:
    caller = namespace.pods["draft"][0].main
    urls = {
        "http://coordinator:8000/v1/models": '"object":"list"',
        "http://coordinator-replicas:9464/metrics": "tandem_num_requests_running{",
        "http://draft:9464/metrics": 'tandem_num_sequences_running{model_name="draft",role="draft"}',
        "http://target:9464/metrics": 'tandem_num_sequences_running{model_name="target",role="target"}',
    }
    done = caller.run("python", "-c", READ, *urls)
    assert done.returncode == 0, done.stderr
    for expected in urls.values():
        assert expected in done.stdout


def test_the_secret_opens_admin_calls(namespace: Namespace) -> None:
    caller = namespace.pods["coordinator"][0].main
    done = caller.run("tandem", "admin", "replicas", "list", "--token", TOKEN, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert [replica["state"] for replica in json.loads(done.stdout)] == ["ready", "ready"]


def test_pods_end_within_their_grace(namespace: Namespace) -> None:
    """The last test of this file. A pod that drains exits 0 by itself, and is no longer ready."""
    for name in ("coordinator", "draft", "target"):
        for pod in namespace.pods[name]:
            assert pod.main.process.stop(pod.workload.pod["terminationGracePeriodSeconds"]) == 0
            assert "stopped" in pod.main.process.stderr

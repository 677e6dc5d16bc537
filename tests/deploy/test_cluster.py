"""`docker compose up`, played out: the images, commands, users, mounts, names and health checks that the files give."""

from __future__ import annotations

import json
import re

import pytest

from tests import bundled_kernels
from tests.deploy.conftest import CLIENT_TOKEN
from tests.deploy.containers import Cluster
from tests.deploy.images import Image
from tests.end_to_end.processes import until

_READ = """
import ssl, sys, urllib.request
trust = ssl.create_default_context(cafile="/certificates/ca.crt")
for path in ("v1/models", ""):
    headers = {"Authorization": f"Bearer {sys.argv[1]}"}
    request = urllib.request.Request(f"https://localhost:8000/{path}", headers=headers)
    print(urllib.request.urlopen(request, context=trust).read().decode())
"""


def test_every_service_becomes_healthy(cluster: Cluster) -> None:
    assert [container.health() for container in cluster.values()] == [0, 0, 0]


def test_a_client_needs_the_token(cluster: Cluster) -> None:
    command = ("tandem", "generate", "def main():", "--max-tokens", "8", "--temperature", "0", "--json")
    done = cluster["coordinator"].run(*command, "--token", CLIENT_TOKEN)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 8
    refused = cluster["coordinator"].run(*command, "--token", "another-token-of-the-test")
    assert refused.returncode == 5, refused.stderr


def test_nobody_gets_in_without_tls(cluster: Cluster) -> None:
    plain = ["env", "-u", "TANDEM_CLIENT_TLS_CA_FILE", "-u", "TANDEM_CLIENT_TLS_CERT_FILE", "--"]
    for name, port in (("draft_service", 50053), ("target_service", 50052), ("coordinator", 50051)):
        health_check = ["python", "-P", "-m", "tandem.serving.healthcheck", f"127.0.0.1:{port}"]
        assert cluster[name].run(*plain, *health_check).returncode == 4


def test_the_model_computes_with_the_kernels_of_its_image(cluster: Cluster) -> None:
    """No image has a compiler."""
    if not bundled_kernels.CAN_COMPILE:
        pytest.skip("there is no C++ compiler here that could build them")
    target = cluster["target_service"].process
    (ready,) = (line for line in (target.stderr + target.stdout).splitlines() if "kernels ready" in line)
    assert bundled_kernels.PLACES[0] in ready


def test_http_answers_and_shows_the_page(cluster: Cluster) -> None:
    """At 8000, which compose opens to this machine."""
    done = cluster["coordinator"].run("python", "-c", _READ, CLIENT_TOKEN)
    assert done.returncode == 0, done.stderr
    assert '"object":"list"' in done.stdout
    assert "<title>" in done.stdout


def test_the_cluster_is_administered_from_within(cluster: Cluster) -> None:
    """With the ADMIN_TOKEN that compose was given."""
    done = cluster["coordinator"].run("tandem", "admin", "replicas", "list", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert {replica["state"] for replica in json.loads(done.stdout)} == {"ready"}
    refused = cluster["coordinator"].run("tandem", "admin", "status", "--token", "not-the-right-one")
    assert refused.returncode == 5
    assert "Traceback" not in refused.stderr


def test_the_coordinator_has_no_torch_and_no_other_service(
    cluster: Cluster, images: dict[str, Image]
) -> None:
    assert not {"torch", "transformers", "safetensors"} & images["coordinator"].packages
    assert {"torch", "transformers", "safetensors"} < images["draft"].packages
    for absent in ("torch", "transformers", "tandem_draft", "tandem_target"):
        assert not images["coordinator"].holds(absent)
        found = cluster["coordinator"].run("python", "-c", f"import {absent}")
        assert "ModuleNotFoundError" in found.stderr
    version = cluster["coordinator"].run("python", "-c", "import tandem; print(tandem.__version__)")
    assert version.stdout.strip() == "0.1.0"


def test_a_further_draft_is_found_and_used(cluster: Cluster) -> None:
    """`docker compose up --scale draft_service=2`."""
    coordinator = cluster["coordinator"].process
    further = cluster.another("draft_service")
    further.wait_until_healthy()
    until(
        lambda: f"replica ready role=draft address={further.address}:" in coordinator.stderr,
        60.0,
        lambda: f"{coordinator.stderr}\n{further.process.stderr}",
    )
    assert further.process.stop() == 0
    # Draining, as a rule; down if it stopped before the watch of its health, which begins when it is found, was open.
    until(
        lambda: bool(
            re.search(rf"replica (draining|down) role=draft address={further.address}:", coordinator.stderr)
        ),
        60.0,
        lambda: coordinator.stderr,
    )


def test_every_container_stops_in_good_order(cluster: Cluster) -> None:
    """The last test of this file: it takes the cluster down, in the order that compose does."""
    for container in reversed(cluster.values()):
        assert container.process.stop() == 0
        assert "stopped" in container.process.stderr

"""The demo with the component `tls`, played out: cert-manager's secrets, exec probes, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.deploy.images import Image
from tests.deploy.kubernetes.pods import Namespace
from tests.deploy.kubernetes.rendered import render

FOLDER = Path(__file__).parent / "cpu_tls"
TOKEN = "a-token-for-the-test-alone"


def issued(objects: list[dict[str, object]]) -> dict[str, dict[str, bytes]]:
    """Fill the secrets of all certificates as cert-manager does."""
    authority = trustme.CA()
    secrets: dict[str, dict[str, bytes]] = {}
    for entry in objects:
        spec = entry.get("spec")
        if entry["kind"] == "Certificate" and isinstance(spec, dict) and not spec.get("isCA"):
            leaf = authority.issue_cert(*spec["dnsNames"])
            secrets[spec["secretName"]] = {
                "ca.crt": authority.cert_pem.bytes(),
                "tls.crt": b"".join(blob.bytes() for blob in leaf.cert_chain_pems),
                "tls.key": leaf.private_key_pem.bytes(),
            }
    return secrets


@pytest.fixture(scope="module")
def namespace(
    engine: None, images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Namespace]:
    objects = render(FOLDER)
    secrets = issued(objects) | {"tandem-tokens": {"tokens": f"{TOKEN}\n".encode()}}
    with Namespace(objects, images, secrets, tmp_path_factory.mktemp("pods")) as running:
        for name in ("target", "draft", "coordinator"):
            for pod in running.pods[name]:
                running.await_ready(pod)
        yield running


@pytest.mark.soak
def test_a_prompt_needs_the_token_and_tls(namespace: Namespace) -> None:
    caller = namespace.pods["coordinator"][0].main
    command = ("tandem", "generate", "def main():", "--max-tokens", "8", "--address", "coordinator:50051")
    trust = ("--tls-ca-file", "/certificates/ca.crt", "--tls-server-name", "coordinator")
    done = caller.run(*command, *trust, "--token", TOKEN)
    assert done.returncode == 0, done.stderr
    refused = caller.run(*command, *trust, "--token", "another-token-of-the-test")
    assert refused.returncode == 5, refused.stderr
    plain = ("env", "-u", "TANDEM_CLIENT_TLS_CA_FILE", "-u", "TANDEM_CLIENT_TLS_CERT_FILE")
    assert caller.run(*plain, *command, "--token", TOKEN).returncode == 4


@pytest.mark.soak
def test_a_service_refuses_callers_without_a_certificate(namespace: Namespace) -> None:
    caller = namespace.pods["target"][0].main
    ask = ("python", "-P", "-m", "tandem.serving.healthcheck", "127.0.0.1:50052")
    assert caller.run(*ask).returncode == 0
    for variables in (("CERT_FILE", "KEY_FILE"), ("CA_FILE", "CERT_FILE", "KEY_FILE")):
        unset = [word for name in variables for word in ("-u", f"TANDEM_CLIENT_TLS_{name}")]
        assert caller.run("env", *unset, *ask).returncode == 4

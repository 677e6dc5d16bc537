"""The same cluster with deploy/compose.tls.yml laid over it: every connection is encrypted, and shows who it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.deploy.compose import services
from tests.deploy.containers import TEST_OPTIONS, Cluster
from tests.deploy.images import Image
from tests.paths import ROOT

pytestmark = pytest.mark.slow

OVERLAY = ROOT / "deploy" / "compose.tls.yml"
TOKEN = "a-token-for-the-test-alone"
ASK = """
import asyncio, sys
from pathlib import Path
from tandem.client import Client
from tandem.rpc.credentials import Credentials
from tandem.types import GenerationRequest

async def ask(token):
    trust = Credentials(ca_file=Path("/certificates/ca.crt"), server_name="localhost", token=token)
    async with Client("127.0.0.1:50051", trust) as client:
        request = GenerationRequest("def main():", max_tokens=8, temperature=0.0)
        return [chunk async for chunk in client.generate(request)]

print(sum(len(chunk.token_ids) for chunk in asyncio.run(ask(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the certificates that the overlay expects in CERTIFICATES."""
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    for service, names in (("draft", ["draft-service"]), ("target", ["target-service"]), ("coordinator", [])):
        own = folder / service
        own.mkdir()
        issued = authority.issue_cert(*names, "localhost")
        authority.cert_pem.write_to_path(own / "ca.crt")
        issued.private_key_pem.write_to_path(own / "tls.key")
        (own / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (folder / "coordinator" / "tokens").write_text(f"{TOKEN}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cluster(
    engine: None, images: dict[str, Image], certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    variables = {"CERTIFICATES": str(certificates), "OPTIONS_FILE": str(TEST_OPTIONS)}
    wanted = services("cpu", variables=variables, overlays=[OVERLAY])
    for service in wanted.values():
        # As tandem.env would have it. A draft that needs no model is there sooner.
        service["environment"]["TANDEM_SPECULATIVE_METHOD"] = "ngram"
    with Cluster(wanted, images, tmp_path_factory.mktemp("containers")) as running:
        yield running


def test_a_client_needs_the_token(cluster: Cluster) -> None:
    done = cluster["coordinator"].run("python", "-c", ASK, TOKEN)
    assert done.stdout == "8\n", done.stderr
    refused = cluster["coordinator"].run("python", "-c", ASK, "another-token-of-the-test")
    assert "UnauthenticatedError" in refused.stderr


def test_nobody_gets_in_without_tls(cluster: Cluster) -> None:
    plain = ["env", "-u", "TANDEM_CLIENT_TLS_CA_FILE", "-u", "TANDEM_CLIENT_TLS_CERT_FILE", "--"]
    for name, port in (("draft_service", 50053), ("target_service", 50052), ("coordinator", 50051)):
        health_check = ["python", "-P", "-m", "tandem.serving.healthcheck", f"127.0.0.1:{port}"]
        assert cluster[name].run(*health_check).returncode == 0
        assert cluster[name].run(*plain, *health_check).returncode == 4

"""The wheel and the images, built once, and the cluster that `docker compose up` starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.certificates import issued
from tests.deploy.compose import services
from tests.deploy.containers import TEST_OPTIONS, Cluster, why_not
from tests.deploy.images import Image, image
from tests.deploy.stages import Builder
from tests.deploy.wheels import build, build_from, install
from tests.paths import ROOT

OVERLAY = ROOT / "deploy" / "compose.tls.yml"
CLIENT_TOKEN = "a-token-for-the-test-alone"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def audit_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_from(ROOT / "packages" / "tandem-audit", tmp_path_factory.mktemp("audit_wheel"))


@pytest.fixture(scope="session")
def plugin_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_from(ROOT / "packages" / "tandem-vllm", tmp_path_factory.mktemp("plugin_wheel"))


@pytest.fixture(scope="session")
def commands(
    wheel: Path, audit_wheel: Path, plugin_wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The commands of an environment in which all wheels are installed."""
    return install(tmp_path_factory.mktemp("environment"), wheel, audit_wheel, plugin_wheel)


@pytest.fixture(scope="session")
def builder(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Builds stages of the Dockerfile, each once for all tests."""
    return Builder(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="session")
def images(builder: Builder) -> dict[str, Image]:
    """The three images, and the one of the demo pair."""
    code = builder.build("code").root / "code"
    return {name: image(name, code) for name in ("coordinator", "draft", "target", "demo-models")}


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips what needs containers where none can be made."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the certificates that deploy/compose.tls.yml expects in CERTIFICATES."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    for service, names in (("draft", ["draft-service"]), ("target", ["target-service"]), ("coordinator", [])):
        issued(folder / service, authority, names=names)
    (folder / "coordinator" / "tokens").write_text(f"{CLIENT_TOKEN}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cluster(
    engine: None, images: dict[str, Image], certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Run the cluster that `docker compose up` starts, with deploy/compose.tls.yml laid over it.

    Every connection is encrypted and shows who it is. tests/deploy/kubernetes has the plain ones, and a draft model.
    """
    variables = {
        "CERTIFICATES": str(certificates), "OPTIONS_FILE": str(TEST_OPTIONS), "ADMIN_TOKEN": "of-the-tests-alone",
    }  # fmt: skip
    wanted = services(variables=variables, overlays=[OVERLAY])
    for name in ("draft_service", "coordinator"):  # a draft that needs no model is there sooner
        wanted[name]["environment"]["TANDEM_SPECULATIVE_METHOD"] = "ngram"
    # Only small steps are prepared at startup.
    limits = {"TANDEM_TARGET_MAX_LENGTH": "32", "TANDEM_TARGET_MAX_SEQUENCES": "2"}
    wanted["target_service"]["environment"] |= limits
    with Cluster(wanted, images, tmp_path_factory.mktemp("containers")) as running:
        yield running

"""Checks of the Dockerfile and the compose files that need no container."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem import __version__
from tandem.config.settings import ModelServerSettings, load_settings
from tandem.engine_vllm.contract import TESTED_RELEASE
from tandem_coordinator.cli.up import SHARES
from tandem_draft.settings import DraftSettings
from tandem_target.settings import TargetSettings
from tests.deploy.compose import COMPOSE_FILE, GPU, interpolated, read, services, set_environment
from tests.deploy.images import Dockerfile
from tests.end_to_end.processes import run
from tests.paths import ROOT

DOCKERFILE = ROOT / "Dockerfile"
COMPOSE_FILES = [COMPOSE_FILE, *sorted((ROOT / "deploy").glob("compose.*.yml"))]
OWN = ("draft_service", "target_service", "coordinator")
MODELS = ("draft_service", "target_service")
ONE_GPU = ROOT / "deploy" / "compose.one-gpu.yml"


def assert_passes(tool: str, *arguments: str) -> None:
    done = run(str(Path(sys.executable).with_name(tool)), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def everything() -> dict[str, dict[str, Any]]:
    """Every service as each file has it: those of deploy/compose.gpu.yml with a suffix."""
    found: dict[str, dict[str, Any]] = services("observe")
    on_gpus = services(overlays=[GPU])
    return found | {f"{name}_gpu": on_gpus[name] for name in MODELS}


def test_compose_files_follow_the_schema(tmp_path: Path) -> None:
    """As they are, and with their variables filled in."""
    filled = [tmp_path / path.name for path in COMPOSE_FILES]
    for path, copy in zip(COMPOSE_FILES, filled, strict=True):
        copy.write_text(json.dumps(interpolated(read(path), {})))
    # Of a file with `!override` only the copy: the checker knows no tags.
    as_written = [path for path in COMPOSE_FILES if "!override" not in path.read_text(encoding="utf-8")]
    files = map(str, (*as_written, *filled))
    assert_passes("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


def test_the_dockerfile_follows_hadolint() -> None:
    assert_passes("hadolint", "--failure-threshold", "style", str(DOCKERFILE))


def test_every_image_has_an_exact_tag(everything: dict[str, dict[str, Any]]) -> None:
    given = [service["image"] for service in everything.values()]
    for image in (*Dockerfile(DOCKERFILE).base_images(), *given):
        tag = image.partition(":")[2]
        assert re.search(r"\d+\.\d+\.\d+", tag), f"{image} may be another image tomorrow"


@pytest.mark.parametrize("profiles", [(), ("observe",)], ids=["alone", "observed"])
@pytest.mark.parametrize("overlays", [[], [GPU], [GPU, ONE_GPU]], ids=["cpu", "gpu", "one gpu"])
def test_a_model_that_is_not_ready_keeps_the_coordinator_from_starting(
    overlays: list[Path], profiles: tuple[str, ...]
) -> None:
    """And `up` fails: Compose passes over a dependency only where it is not required."""
    chosen = services(*profiles, overlays=overlays)
    assert chosen.keys() >= set(OWN)
    assert chosen["coordinator"]["depends_on"] == {name: {"condition": "service_healthy"} for name in MODELS}


def start(service: dict[str, Any], folder: Path, **variables: str) -> str:
    """Run what a container starts with, in this folder and as far as the service itself. What it printed."""
    (module,) = re.findall(r"tandem_(?:coordinator|draft|target)\b", str(service["command"]))
    words = [
        word.replace(f"exec python -P -m {module}", "env").replace("/run/tandem", str(folder))
        for word in [*service["entrypoint"], *service["command"]]
    ]
    if words[-1] == module:
        words[-4:] = ["true"]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"} | variables
    done = run(*words, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("given", ["", "a-token-of-many-characters"], ids=["made", "given"])
def test_an_admin_token_is_made_where_none_is_given(given: str, tmp_path: Path) -> None:
    service = services(variables={"ADMIN_TOKEN": given})["coordinator"]
    file = tmp_path / "admin"
    printed = start(
        service,
        tmp_path,
        ADMIN_TOKEN=service["environment"]["ADMIN_TOKEN"],
        TANDEM_COORDINATOR_ADMIN_TOKEN_FILE=str(file),
    )
    token = file.read_text(encoding="utf-8").strip()
    assert len(token) >= 16
    assert (token == given) == bool(given)
    assert printed.count(token) == (0 if given else 1), "printed once, and in no variable"
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "variables", [{}, {"TANDEM_COORDINATOR_TLS_CERT_FILE": "tls.crt"}], ids=["plain", "tls"]
)
def test_the_coordinator_says_what_to_open(variables: dict[str, str], tmp_path: Path) -> None:
    service = services(variables={"HTTP_PORT": "8001"})["coordinator"]
    file = tmp_path / "admin"
    printed = start(service, tmp_path, TANDEM_COORDINATOR_ADMIN_TOKEN_FILE=str(file), **variables)
    scheme = "https" if variables else "http"
    assert f"{scheme}://127.0.0.1:8001/v1\n" in printed
    assert "docker compose exec coordinator tandem generate" in printed


def test_the_services_share_one_token(tmp_path: Path) -> None:
    """Whichever starts first makes it, and those that start at once agree."""
    names = [*MODELS] * 6
    chosen = services()
    token = tmp_path / "token"
    for _ in range(3):
        token.unlink(missing_ok=True)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: start(chosen[name], tmp_path), names))
        made = token.read_text(encoding="utf-8")
        assert re.fullmatch(r"[0-9a-f]{64}\n", made)
        assert token.stat().st_mode & 0o077 == 0
        start(chosen["target_service"], tmp_path)
        assert token.read_text(encoding="utf-8") == made
        assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("name", OWN)
def test_each_service_knows_the_token(everything: dict[str, dict[str, Any]], name: str) -> None:
    service = everything[name]
    role = name.removesuffix("_gpu").removesuffix("_service").upper()
    option = "SERVICE_TOKEN_FILE" if role == "COORDINATOR" else "AUTH_TOKEN_FILE"
    assert service["environment"][f"TANDEM_{role}_{option}"] == "/run/tandem/token"
    assert "service-token:/run/tandem:rw" in service["volumes"]


def test_all_services_have_one_length_of_proposals(everything: dict[str, dict[str, Any]]) -> None:
    """It is an option of the file that all of them read, and no service has one of its own."""
    files = []
    for name in ("draft_service", "target_service", "coordinator"):
        files.append(everything[name]["env_file"])
        assert not [each for each in everything[name]["environment"] if "SPECULATIVE" in each]
    assert files[0] == files[1] == files[2]


def test_observe_env_adds_the_observability_services() -> None:
    lines = (ROOT / "deploy" / "observe.env").read_text(encoding="utf-8").splitlines()
    variables = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    chosen = services(*variables["COMPOSE_PROFILES"].split(","), variables=variables)
    assert chosen.keys() > {"coordinator", "collector", "prometheus", "grafana", "jaeger"}
    for name, service in (
        ("coordinator", "COORDINATOR"),
        ("draft_service", "DRAFT"),
        ("target_service", "TARGET"),
    ):
        endpoint = chosen[name]["environment"][f"TANDEM_{service}_OTLP_ENDPOINT"]
        assert endpoint == "http://collector:4317"
        assert services()[name]["environment"][f"TANDEM_{service}_OTLP_ENDPOINT"] == ""


def test_containers_are_confined(everything: dict[str, dict[str, Any]]) -> None:
    for name, service in everything.items():
        assert re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", (
            f"{name}: `up --wait` takes one that ends for one that failed"
        )
        assert "container_name" not in service, f"{name} could not be scaled"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to other machines"


@pytest.mark.parametrize("name", OWN)
def test_our_services_are_as_their_image_says(everything: dict[str, dict[str, Any]], name: str) -> None:
    service = everything[name]
    dockerfile = Dockerfile(DOCKERFILE)
    stage = service["build"]["target"]
    assert service["healthcheck"]["test"] == ["CMD", *dockerfile.health_check(stage)]
    assert service["user"] == dockerfile.last(stage, "USER")
    assert dockerfile.last(stage, "EXPOSE") in service["healthcheck"]["test"][-1]
    default_drain = 30
    assert int(service["stop_grace_period"].removesuffix("s")) > default_drain
    home = dockerfile.environment(stage)["HOME"]
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro") and volume != home]
    assert writable == ["service-token:/run/tandem:rw"]
    if name != "coordinator":
        assert not service.get("ports"), f"{name} could not be scaled"
        assert set(service["networks"]) == {"models"}


def gpus_of(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    found: list[str] = device["device_ids"]
    return found


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_model_on_a_gpu_is_run_by_vllm(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings accept what image and compose file say together, and vLLM has the shared memory that it needs."""
    service = services(overlays=[GPU])[f"{role}_service"]
    dockerfile = Dockerfile(DOCKERFILE)
    stage = service["build"]["target"]
    given = dockerfile.environment(stage) | service["environment"]
    set_environment(monkeypatch, {name: value for name, value in given.items() if "TANDEM_" in name})
    kind: type[ModelServerSettings] = DraftSettings if role == "draft" else TargetSettings
    loaded = load_settings(kind, (), role)
    assert loaded.uses_vllm
    assert (loaded.compute_device, loaded.device_count) == ("cuda", 1)
    assert loaded.model == Path("/models", role)
    assert int(service["shm_size"].removesuffix("g")) >= 8
    assert given["HOME"] in service["volumes"]
    (release,) = re.findall(r"vllm-openai:v(\d+\.\d+)\.", str(dockerfile.base_images()))
    assert release == TESTED_RELEASE
    assert len(gpus_of(service)) == 1


@pytest.mark.parametrize("overlays", [[], [GPU]], ids=["cpu", "gpu"])
def test_models_may_be_named_by_id(overlays: list[Path]) -> None:
    variables = {"MODEL_PREFIX": "", "TARGET_MODEL": "Qwen/Qwen3-8B", "HF_CACHE": "~/.cache/huggingface"}
    target = services(variables=variables, overlays=overlays)["target_service"]
    assert target["environment"]["TANDEM_TARGET_MODEL"] == "Qwen/Qwen3-8B"
    assert target["environment"]["HF_HUB_OFFLINE"] == "1", "there is no way to the internet"
    assert f"~/.cache/huggingface:{target['environment']['HF_HOME']}:ro" in target["volumes"]


def test_both_models_fit_on_one_gpu() -> None:
    """With the shares of `tandem up`, and one after the other, since vLLM measures what is free."""
    chosen = services(variables={"TARGET_GPU": "3"}, overlays=[GPU, ONE_GPU])
    draft = chosen["draft_service"]
    target = chosen["target_service"]
    assert gpus_of(draft) == gpus_of(target) == ["3"]
    shares = {
        "target": target["environment"]["TANDEM_TARGET_DEVICE_MEMORY_UTILIZATION"],
        "draft": draft["environment"]["TANDEM_DRAFT_DEVICE_MEMORY_UTILIZATION"],
    }
    assert shares == SHARES
    assert draft["depends_on"] == {"target_service": {"condition": "service_healthy"}}


def test_replicas_have_gpus_of_their_own(tmp_path: Path) -> None:
    """The output of deploy/gpus.py is laid over the compose file."""
    overlay = tmp_path / "gpus.yml"
    replicas = ("--target", "0,1", "--target", "2,3", "--draft", "GPU-4")
    command = (sys.executable, str(ROOT / "deploy" / "gpus.py"), *replicas)
    overlay.write_text(run(*command).stdout, encoding="utf-8")
    chosen = services(overlays=[overlay])
    del chosen["coordinator"]
    assert {name: gpus_of(service) for name, service in chosen.items()} == {
        "target_service": ["0", "1"],
        "target_service_2": ["2", "3"],
        "draft_service": ["GPU-4"],
    }
    first = chosen["target_service"]
    second = chosen["target_service_2"]
    assert first["environment"]["TANDEM_TARGET_TENSOR_PARALLEL_SIZE"] == 2
    assert chosen["draft_service"]["environment"]["TANDEM_DRAFT_TENSOR_PARALLEL_SIZE"] == 1
    for name in ("image", "environment", "networks", "volumes", "healthcheck", "tmpfs", "shm_size"):
        assert second[name] == first[name]


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("gpus.py", "--target", "2,3", "--draft", "3"), 2, "GPU 3 is named twice"),
        (("gpus.py", "--target", "0,two", "--draft", "1"), 2, "GPU is 'two'; it must be a number"),
        (("gpus.py", "--target", "0"), 2, "required: --draft"),
        (("-S", "gpus.py", "--target", "2"), 1, "error: this script needs PyYAML"),  # without site-packages
    ],
)
def test_wrong_gpus_are_refused_with_a_sentence(options: tuple[str, ...], code: int, sentence: str) -> None:
    ran = run(sys.executable, *options, folder=ROOT / "deploy")
    assert (ran.returncode, ran.stdout) == (code, "")
    assert sentence in ran.stderr
    assert "Traceback" not in ran.stderr


def test_http_is_open_to_this_machine(everything: dict[str, dict[str, Any]]) -> None:
    """With the API and the page on 8000; `HTTP_PORT` and `BIND_ADDRESS` say otherwise."""
    coordinator = everything["coordinator"]
    assert "127.0.0.1:8000:8000" in coordinator["ports"]
    environment = coordinator["environment"]
    assert environment["TANDEM_COORDINATOR_HTTP_HOST"] == "0.0.0.0"
    assert environment["TANDEM_COORDINATOR_HTTP_PORT"] == 8000
    variables = {"BIND_ADDRESS": "10.0.0.1", "HTTP_PORT": "8001"}
    assert "10.0.0.1:8001:8000" in services(variables=variables)["coordinator"]["ports"]


VERSION = re.compile(
    r"(?:tandem/[a-z-]+:|newTag: |IMAGE_TAG(?::-|=)|[tT]ag: |[vV]ersion: |tandem-speculative==|tandem_speculative-)"
    r"(\d+\.\d+\.\d+)"
)
"""Places where files that no program fills in name the release."""


def test_every_file_names_the_version_of_pyproject() -> None:
    files = [ROOT / ".env.example", ROOT / "README.md", ROOT / "docs" / "deployment.md", COMPOSE_FILE]
    files += sorted((ROOT / "deploy").rglob("*.y*ml"))
    files += sorted((ROOT / "packages").glob("*/pyproject.toml"))
    named = [
        (str(file.relative_to(ROOT)), version)
        for file in files
        for version in VERSION.findall(file.read_text(encoding="utf-8"))
    ]
    assert len(named) > 15
    assert [(file, version) for file, version in named if version != __version__] == []

"""The manifests of deploy/kubernetes as they are: rendered as kustomize does, without a fault, and with our names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.settings.coordinator import CoordinatorSettings
from deploy.manifests.checks import faults
from deploy.manifests.kustomize import render
from deploy.manifests.merge import ManifestError
from deploy.manifests.workloads import Manifests
from draft_service.settings import DraftSettings
from tandem.settings import ServerSettings, load_settings
from target_service.settings import TargetSettings
from tests.deploy.dockerfile import Dockerfile
from tests.deploy.kubernetes.rendered import (
    KUBERNETES,
    OVERLAYS,
    built,
    by_name,
    kustomize_command,
    named,
    rendered,
)
from tests.paths import ROOT

SETTINGS: dict[str, type[ServerSettings]] = {
    "draft": DraftSettings,
    "target": TargetSettings,
    "coordinator": CoordinatorSettings,
}
CPU_TLS = Path(__file__).parent / "cpu_tls"
ADAPTER = KUBERNETES / "components" / "autoscaling" / "prometheus-adapter.yaml"


def environment_of(objects: list[dict[str, Any]], name: str) -> dict[str, str]:
    """The environment of a Deployment's container, with a stand-in for what only a cluster knows."""
    manifests = Manifests(objects)
    (workload,) = (each for each in manifests.workloads if each.name == name)
    values = manifests.options(workload)
    for entry in workload.pod["containers"][0]["env"]:
        if key := entry.get("valueFrom", {}).get("configMapKeyRef"):
            config_map = manifests.named("ConfigMap", key["name"])
            assert config_map is not None
            values[entry["name"]] = config_map["data"][key["key"]]
        else:
            values[entry["name"]] = entry.get(
                "value", "1" if "resourceFieldRef" in str(entry) else "of-a-secret-alone"
            )
    return values


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_no_fault(overlay: str) -> None:
    assert faults(rendered(overlay)) == []


@pytest.mark.parametrize(
    "folder",
    [*(KUBERNETES / "overlays" / name for name in OVERLAYS), CPU_TLS],
    ids=lambda folder: folder.name,
)
def test_kustomize_renders_the_same(folder: Path) -> None:
    command = kustomize_command()
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    assert by_name(render(folder)) == by_name(built(command, folder))


def test_a_registry_of_ones_own_can_be_named(tmp_path: Path) -> None:
    base = os.path.relpath(KUBERNETES / "overlays" / "cpu", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{base}]\nimages: [{{name: tandem/draft, newName: mine/draft, newTag: 1.2.3}}]\n"
    )
    objects = render(tmp_path)
    draft = named(objects, "Deployment", "draft")["spec"]["template"]["spec"]["containers"][0]
    assert draft["image"] == "mine/draft:1.2.3"
    assert faults(objects) == []


def test_rendered_objects_are_checked_from_stdin() -> None:
    objects = rendered("cpu")
    named(objects, "Service", "draft")["spec"]["selector"] = {"app": "nobody"}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.manifests", "-"],
        cwd=ROOT,
        input=yaml.safe_dump_all(objects),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Service/draft: its selector means 0 workloads" in done.stdout


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_option_is_one_that_the_services_know(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings accept the environment as a whole, rules included."""
    objects = rendered(overlay)
    for name, settings in SETTINGS.items():
        if overlay == "vllm" and name != "draft":
            continue
        with monkeypatch.context() as patch:
            for variable in [variable for variable in os.environ if variable.startswith("TANDEM_")]:
                patch.delenv(variable)
            given = environment_of(objects, name) | {f"TANDEM_{name.upper()}_HOST": "0.0.0.0"}
            for variable, value in given.items():
                patch.setenv(variable, value)
            loaded = load_settings(settings, (), name)
            fields = {field.upper() for field in settings.model_fields}
            own = f"TANDEM_{name.upper()}_"
            unknown = {variable for variable in given if variable.startswith(own)} - {
                own + field for field in fields
            }
            assert not unknown
            assert loaded.uses_tls is (overlay != "cpu")
            assert loaded.insecure is (overlay == "cpu")


def test_images_users_and_ports_are_those_of_the_dockerfile() -> None:
    dockerfile = Dockerfile(ROOT / "Dockerfile")
    for overlay in OVERLAYS:
        for workload in Manifests(rendered(overlay)).workloads:
            context = workload.pod["securityContext"]
            for container in (*workload.pod.get("initContainers", []), *workload.pod["containers"]):
                stage = container["image"].removeprefix("tandem/").partition(":")[0]
                assert stage in dockerfile.stages, container["image"]
                user = dockerfile.last(stage, "USER")
                assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
                exposed = {int(port) for each in dockerfile.chain(stage) for port in each.all("EXPOSE")}
                assert exposed <= set(workload.ports.values())


def test_autoscalers_use_metrics_that_the_adapter_and_the_services_have() -> None:
    rules = {rule["name"]["as"]: rule for rule in yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]}
    exported = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (
            ROOT / "tandem" / "telemetry" / "service_metrics.py",
            ROOT / "coordinator" / "telemetry" / "state.py",
        )
    )
    scalers = [entry for entry in rendered("gpu") if entry["kind"] == "HorizontalPodAutoscaler"]
    assert {entry["metadata"]["name"] for entry in scalers} == {"draft", "target", "coordinator"}
    for scaler in scalers:
        (metric,) = scaler["spec"]["metrics"]
        name = metric["pods"]["metric"]["name"]
        assert rules[name]["seriesQuery"].startswith(name + "{")
        assert f'"{name.removeprefix("tandem_")}"' in exported


def test_the_dashboard_is_the_one_of_grafana() -> None:
    config_map = named(rendered("gpu"), "ConfigMap", "tandem-dashboard")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    path = ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json"
    assert json.loads(config_map["data"]["tandem.json"]) == json.loads(path.read_text(encoding="utf-8"))


def test_the_alerts_are_those_of_compose() -> None:
    path = ROOT / "deploy" / "prometheus" / "alerts.yml"
    expected = yaml.safe_load(path.read_text(encoding="utf-8"))
    for overlay in ("gpu", "vllm"):
        assert named(rendered(overlay), "PrometheusRule", "tandem")["spec"] == expected


def test_the_plug_in_of_vllm_knows_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in = pytest.importorskip("tandem.integrations.vllm.settings")
    given = environment_of(rendered("vllm"), "vllm")
    for variable in [variable for variable in os.environ if variable.startswith("TANDEM_")]:
        monkeypatch.delenv(variable)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = plug_in.read_settings()
    assert settings.draft_address == "draft:50053"
    assert settings.service_credentials.uses_tls
    own = {variable for variable in given if variable.startswith("TANDEM_")}
    assert own <= {f"TANDEM_VLLM_{field.upper()}" for field in type(settings).model_fields}


def test_every_file_is_used() -> None:
    """A file that no kustomization names would be applied by nobody."""
    unused = set(KUBERNETES.rglob("*.yaml")) - {ADAPTER}
    for kustomization in list(KUBERNETES.rglob("kustomization.yaml")):
        unused.discard(kustomization)
        config = yaml.safe_load(kustomization.read_text(encoding="utf-8"))
        names = [*config.get("resources", []), *(patch["path"] for patch in config.get("patches", []))]
        unused -= {(kustomization.parent / name).resolve() for name in names}
    assert not unused


def test_the_command_prints_each_overlay() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.manifests"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")] == list(
        OVERLAYS
    )


def test_the_command_prints_the_faults_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namespace: mine\nresources: [service.yaml]\n")
    (tmp_path / "service.yaml").write_text(
        "{apiVersion: v1, kind: Service, metadata: {name: lost}, "
        "spec: {selector: {app: nobody}, ports: [{port: 1, targetPort: grpc}]}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "deploy.manifests", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Service/lost: its selector means 0 workloads; it must be one" in done.stdout


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("helmCharts: []\n", "helmCharts is not known here"),
        ("resources: [missing.yaml]\n", "cannot be read"),
        ("resources: [twice.yaml]\n", "there are two objects Service/a"),
        ("patches: [{path: patch.yaml}]\n", "there is no Deployment nobody to patch"),
    ],
)
def test_a_broken_kustomization_is_an_error(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "kustomization.yaml").write_text(content)
    (tmp_path / "twice.yaml").write_text(
        "kind: Service\nmetadata: {name: a}\n---\nkind: Service\nmetadata: {name: a}\n"
    )
    (tmp_path / "patch.yaml").write_text("kind: Deployment\nmetadata: {name: nobody}\n")
    with pytest.raises(ManifestError, match=re.escape(sentence)):
        render(tmp_path)

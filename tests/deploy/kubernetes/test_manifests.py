"""The manifests of deploy/kubernetes as they are: rendered as kustomize does, without a fault, and with our names."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tandem.config.settings import ModelServerSettings, ServerSettings, load_settings
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_draft.settings import DraftSettings
from tandem_target.settings import TargetSettings
from tests.deploy.compose import set_environment
from tests.deploy.images import Dockerfile
from tests.deploy.kubernetes.rendered import KUBERNETES, OVERLAYS, Manifests, named, rendered
from tests.paths import ROOT

SETTINGS: dict[str, type[ServerSettings]] = {
    "draft": DraftSettings,
    "target": TargetSettings,
    "coordinator": CoordinatorSettings,
}
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
def test_every_option_is_one_that_the_services_know(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings accept the environment as a whole, rules included."""
    objects = rendered(overlay)
    for name, settings in SETTINGS.items():
        if overlay == "vllm" and name != "draft":
            continue
        with monkeypatch.context() as patch:
            given = environment_of(objects, name) | {f"TANDEM_{name.upper()}_HOST": "0.0.0.0"}
            set_environment(patch, given)
            loaded = load_settings(settings, (), name)
            fields = {field.upper() for field in settings.model_fields}
            own = f"TANDEM_{name.upper()}_"
            unknown = {variable for variable in given if variable.startswith(own)} - {
                own + field for field in fields
            }
            assert not unknown
            option = "SERVICE_TOKEN" if name == "coordinator" else "AUTH_TOKEN"
            assert given[own + option] == "of-a-secret-alone"
            assert loaded.uses_tls is (overlay != "cpu")
            assert loaded.insecure is (overlay == "cpu")
            if isinstance(loaded, ModelServerSettings):
                assert loaded.uses_vllm is (overlay != "cpu")


def test_images_users_and_ports_are_those_of_the_dockerfile() -> None:
    dockerfile = Dockerfile(ROOT / "Dockerfile")
    for overlay in OVERLAYS:
        for workload in Manifests(rendered(overlay)).workloads:
            context = workload.pod["securityContext"]
            for container in workload.containers:
                name, _, tag = container["image"].removeprefix("tandem/").partition(":")
                stage = f"{name}-gpu" if tag.endswith("-gpu") else name
                assert stage in dockerfile.stages, container["image"]
                user = dockerfile.last(stage, "USER")
                assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
                exposed = {int(port) for each in dockerfile.chain(stage) for port in each.all("EXPOSE")}
                assert exposed <= set(workload.ports.values())


def test_autoscalers_use_metrics_that_the_adapter_and_the_services_have() -> None:
    rules = {rule["name"]["as"]: rule for rule in yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]}
    folders = (ROOT / "tandem" / "telemetry", ROOT / "coordinator" / "telemetry")
    exported = "\n".join(path.read_text(encoding="utf-8") for each in folders for path in each.glob("*.py"))
    scalers = [entry for entry in rendered("gpu") if entry["kind"] == "HorizontalPodAutoscaler"]
    assert {entry["metadata"]["name"] for entry in scalers} == {"draft", "target", "coordinator"}
    for scaler in scalers:
        for metric in scaler["spec"]["metrics"]:
            name = metric["pods"]["metric"]["name"]
            assert rules[name]["seriesQuery"].startswith(name + "{")
            assert f'"{name.removeprefix("tandem_")}"' in exported or f'"{name}"' in exported
    (draft,) = (entry for entry in scalers if entry["metadata"]["name"] == "draft")
    assert {metric["pods"]["metric"]["name"] for metric in draft["spec"]["metrics"]} == {
        "tandem_num_sequences_running",
        "tandem_draft_wait_steps",
    }


def test_dashboard_and_alerts_are_those_of_compose() -> None:
    config_map = named(rendered("gpu"), "ConfigMap", "tandem-dashboard")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    path = ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json"
    assert json.loads(config_map["data"]["tandem.json"]) == json.loads(path.read_text(encoding="utf-8"))
    path = ROOT / "deploy" / "prometheus" / "alerts.yml"
    expected = yaml.safe_load(path.read_text(encoding="utf-8"))
    for overlay in ("gpu", "vllm"):
        assert named(rendered(overlay), "PrometheusRule", "tandem")["spec"] == expected


def test_the_plug_in_of_vllm_knows_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in = pytest.importorskip("tandem_vllm.settings")
    given = environment_of(rendered("vllm"), "vllm")
    set_environment(monkeypatch, given)
    settings = plug_in.read_settings()
    assert settings.draft_address == "draft:50053"
    assert settings.service_credentials.uses_tls
    assert settings.service_credentials.token == "of-a-secret-alone"
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

"""The Helm chart, by Helm's own library: it lints, and its objects are those of kustomize with the values put in."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.kubernetes.rendered import KUBERNETES, Object, named, render
from tests.paths import ROOT

helm: Any = pytest.importorskip("helm_python")
CHART = ROOT / "deploy" / "helm" / "tandem"


def objects(values: dict[str, Any] | None = None) -> list[Object]:
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="tandem", namespace="tandem")
    return [entry for text in texts.values() for entry in yaml.safe_load_all(text) if entry]


def key(entry: Object) -> tuple[str, str]:
    return entry["kind"], entry["metadata"]["name"]


def test_the_chart_lints() -> None:
    report = helm.lint(str(CHART), strict=True)
    assert report["total_charts_linted"] == 1
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert not report["errors"]


def test_its_objects_are_those_of_the_base() -> None:
    base = {
        key(entry): entry
        for entry in render(KUBERNETES / "base")
        if entry["kind"] not in ("Namespace", "ConfigMap")
    }
    made = {key(entry): entry for entry in objects()}
    assert {name for kind, name in made if kind == "ConfigMap"} == {"tandem-options", "tandem-models"}
    assert {each for each in made if each[0] != "ConfigMap"} == set(base)
    for name, entry in base.items():
        found = made[name]
        if entry["kind"] != "Deployment":
            assert found == entry
            continue
        assert found["spec"]["replicas"] == entry["spec"]["replicas"]
        containers, own = (each["spec"]["template"]["spec"]["containers"] for each in (entry, found))
        assert [each["image"] for each in own] == [each["image"] for each in containers]


def test_the_options_are_those_of_the_base() -> None:
    base = render(KUBERNETES / "base")
    for name in ("tandem-options", "tandem-models"):
        assert named(objects(), "ConfigMap", name)["data"] == named(base, "ConfigMap", name)["data"]


def test_values_name_images_numbers_and_a_claim() -> None:
    made = objects(
        {
            "image": {"repository": "mine", "tag": "1-gpu", "coordinatorTag": "1"},
            "replicas": {"draft": 2},
            "claim": "weights",
            "options": {"TANDEM_NUM_SPECULATIVE_TOKENS": "6"},
        }
    )
    draft, coordinator = (named(made, "Deployment", name)["spec"] for name in ("draft", "coordinator"))
    assert draft["replicas"] == 2
    assert draft["template"]["spec"]["containers"][0]["image"] == "mine/draft:1-gpu"
    assert coordinator["template"]["spec"]["containers"][0]["image"] == "mine/coordinator:1"
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in draft[
        "template"
    ]["spec"]["volumes"]
    assert not [entry for entry in made if entry["kind"] == "PersistentVolumeClaim"]
    assert named(made, "ConfigMap", "tandem-options")["data"]["TANDEM_NUM_SPECULATIVE_TOKENS"] == "6"


def test_autoscalers_take_the_place_of_numbers() -> None:
    made = objects({"autoscaling": {"enabled": True, "maxReplicas": {"draft": 9}}})
    scaler = named(made, "HorizontalPodAutoscaler", "draft")
    assert scaler["spec"]["maxReplicas"] == 9
    metrics = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
    assert "tandem_draft_wait_steps" in metrics
    assert "replicas" not in named(made, "Deployment", "draft")["spec"]

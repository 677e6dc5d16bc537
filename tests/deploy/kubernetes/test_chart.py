"""The Helm chart, by Helm's own library: it lints, and its objects are those of kustomize with the values put in."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
import yaml

from tests.deploy.kubernetes.rendered import KUBERNETES, Object, named, render
from tests.deploy.kubernetes.test_policy import faults
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
    made_elsewhere = ("Namespace", "ConfigMap", "PersistentVolumeClaim", "Secret")
    base = {key(entry): entry for entry in render(KUBERNETES / "base") if entry["kind"] not in made_elsewhere}
    made = {key(entry): entry for entry in objects()}
    assert {name for kind, name in made if kind == "ConfigMap"} == {"tandem-options", "tandem-models"}
    assert {each for each in made if each[0] not in made_elsewhere} == set(base)
    for name, entry in base.items():
        found = made[name]
        if entry["kind"] != "Deployment":
            assert found == entry
            continue
        assert found["spec"]["replicas"] == entry["spec"]["replicas"]
        containers, own = (each["spec"]["template"]["spec"]["containers"] for each in (entry, found))
        assert [each["image"] for each in own] == [each["image"] for each in containers]
        names = [[variable["name"] for variable in each[0]["env"]] for each in (containers, own)]
        assert names[0] == names[1]


@pytest.mark.parametrize(
    "values",
    [{}, {"claim": "weights"}, {"autoscaling": {"enabled": True}}, {"serviceSecret": "mine"}],
    ids=["defaults", "claim", "autoscaling", "secret"],
)
def test_a_rendered_chart_has_no_fault(values: dict[str, Any]) -> None:
    """By the same checks as the overlays, with what the release adds and what a user of these values has."""
    made = objects(values)
    claim = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    made += [
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim}
        for name in [values.get("claim")]
        if name
    ]
    for entry in made:
        entry["metadata"]["namespace"] = "tandem"
    given = {values["serviceSecret"]} if "serviceSecret" in values else set()
    assert list(faults(made, given)) == []


def test_all_services_have_one_length_of_proposals() -> None:
    """It is an option of all of them, and no service has one of its own."""
    made = objects({"options": {"TANDEM_NUM_SPECULATIVE_TOKENS": "6"}})
    options = next(entry["data"] for entry in made if key(entry) == ("ConfigMap", "tandem-options"))
    assert options["TANDEM_NUM_SPECULATIVE_TOKENS"] == "6"
    deployments = [entry for entry in made if entry["kind"] == "Deployment"]
    assert len(deployments) == 3
    for entry in deployments:
        for container in entry["spec"]["template"]["spec"]["containers"]:
            assert {"configMapRef": {"name": "tandem-options"}} in container["envFrom"]
            assert not [each for each in container["env"] if "SPECULATIVE" in each["name"]]


def test_by_default_nothing_must_be_there_but_the_images() -> None:
    """The demo pair comes in an image, and the token of the services is made."""
    made = objects()
    assert not [entry for entry in made if entry["kind"] == "PersistentVolumeClaim"]
    assert "persistentVolumeClaim" not in str(made)
    for name in ("draft", "target"):
        pod = named(made, "Deployment", name)["spec"]["template"]["spec"]
        (init,) = pod["initContainers"]
        assert init["image"] == "tandem/demo-models:0.1.0"
    token = base64.b64decode(named(made, "Secret", "tandem-services")["data"]["token"]).decode()
    assert re.fullmatch("[A-Za-z0-9]{64}", token)
    again = base64.b64decode(named(objects(), "Secret", "tandem-services")["data"]["token"]).decode()
    assert token != again


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
            "serviceSecret": "mine",
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
    assert "initContainers" not in draft["template"]["spec"]
    assert not [entry for entry in made if entry["kind"] in ("PersistentVolumeClaim", "Secret")]
    for deployment in (draft, coordinator):
        (variable,) = (
            each["valueFrom"]["secretKeyRef"]["name"]
            for each in deployment["template"]["spec"]["containers"][0]["env"]
            if each["name"].endswith(("_AUTH_TOKEN", "_SERVICE_TOKEN"))
        )
        assert variable == "mine"
    assert named(made, "ConfigMap", "tandem-options")["data"]["TANDEM_NUM_SPECULATIVE_TOKENS"] == "6"


def test_autoscalers_take_the_place_of_numbers() -> None:
    made = objects({"autoscaling": {"enabled": True, "maxReplicas": {"draft": 9}}})
    scaler = named(made, "HorizontalPodAutoscaler", "draft")
    assert scaler["spec"]["maxReplicas"] == 9
    metrics = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
    assert "tandem_draft_wait_steps" in metrics
    assert "replicas" not in named(made, "Deployment", "draft")["spec"]

"""Checks of the dashboard and the alerts that need no process."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tandem.model.types import SpeculationStats
from tandem.telemetry.service import EngineMetrics, StreamMetrics
from tandem_coordinator.telemetry.metrics import RequestMetrics, WaitMetrics, state_metrics
from tandem_coordinator.telemetry.observer import State
from tandem_vllm import metrics as vllm_metrics
from tests.end_to_end.processes import run
from tests.paths import ROOT
from tests.unit.coordinator.cli.samples import REPLICAS, STATUS

VLLM_METRICS = {
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_drafts",
    "vllm:generation_tokens",
    "vllm:num_requests_running",
}
"""As vLLM 0.32 names them (`vllm/v1/spec_decode/metrics.py`, `vllm/v1/metrics/loggers.py`)."""
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; it comes with Debian's package prometheus",
)


def check(*arguments: str) -> None:
    done = run("promtool", "check", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_a_query_asks_for_is_exported() -> None:
    registry = CollectorRegistry()
    for kind in (RequestMetrics, WaitMetrics, StreamMetrics, EngineMetrics):
        kind(registry, model_name="m")
    vllm_metrics.register(registry, vllm_metrics.Counts(), lambda: 0)
    exported = VLLM_METRICS | {family.name for family in registry.collect()}
    stats = SpeculationStats(rounds=1, drafted=1)
    replica = REPLICAS[0]
    state = State("m", 1, 0, 0, 1, {"greedy": stats}, stats, [replica], STATUS.decisions)
    exported |= {family.name for family in state_metrics(state, {("draft", "sent"): 1})}
    # Gauges of a KV cache that is read when somebody asks: their names are in the source.
    source = (ROOT / "tandem" / "telemetry" / "service.py").read_text(encoding="utf-8")
    exported |= {f"tandem_{word}" for word in re.findall(r'"(\w+)"', source)}
    names = re.findall(
        r"\b((?:vllm:|tandem_)\w+?)(?:_bucket|_sum|_count|_total)?\b",
        " ".join((*queries(), *queries(VLLM_DASHBOARD), *alerts().values())),
    )
    asked = set(names)
    assert len(asked) > 30
    assert not asked - exported


@needs_promtool
def test_every_query_is_valid(tmp_path: Path) -> None:
    both = [*queries(), *queries(VLLM_DASHBOARD)]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(both)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    check("rules", str(path))


@needs_promtool
def test_prometheus_takes_its_configuration() -> None:
    check("config", str(ROOT / "deploy" / "prometheus" / "prometheus.yml"))


@needs_promtool
def test_alerts_fire_when_something_hurts_and_only_then(tmp_path: Path) -> None:
    """Cases written by hand; the next test has recordings of real clusters."""
    series = (ROOT / "tests" / "deploy" / "alerts.yml").read_text(encoding="utf-8")
    path = tmp_path / "alerts.yml"
    path.write_text(series.replace("[RULES]", f"[{ALERTS}]"), encoding="utf-8")
    done = run("promtool", "test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


FIRING: dict[str, dict[str, tuple[int, int]]] = {
    "pays": {},
    "unused": {"TandemDraftingOff": (9, 17)},
    "slower": {"TandemSlowerThanTarget": (9, 14)},
    "killed": {"TandemNoDraft": (4, 6), "TandemNoTarget": (8, 9)},
    "crowded": {"TandemQueueing": (4, 6)},
}
"""By scenario, the minute until which an alert is silent and the one by which it fires; others never do."""


@needs_promtool
def test_alerts_fire_on_recordings_of_what_hurts_and_only_then(tmp_path: Path) -> None:
    recorded = yaml.safe_load((ROOT / "tests" / "deploy" / "recorded_series.yml").read_text(encoding="utf-8"))
    assert recorded.keys() == FIRING.keys()
    rules = {rule["alert"]: rule for rule in alert_rules()}
    tests = [
        {
            "name": name,
            "interval": "15s",
            "input_series": [
                {"series": series, "values": values} for series, values in recorded[name].items()
            ],
            "alert_rule_test": [
                each for rule in rules.values() for each in expected(rule, FIRING[name].get(rule["alert"]))
            ],
        }
        for name in FIRING
    ]
    path = tmp_path / "recorded.yml"
    document = {"rule_files": [str(ALERTS)], "evaluation_interval": "15s", "tests": tests}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    done = run("promtool", "test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def expected(rule: dict[str, Any], firing: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """The state of an alert at each minute of a recording, but for those in which it may begin to fire."""
    silent_until, fires_by = firing or (RECORDED_MINUTES, RECORDED_MINUTES + 1)
    for minute in range(1, RECORDED_MINUTES + 1):
        asked = {"eval_time": f"{minute}m", "alertname": rule["alert"]}
        if minute <= silent_until:
            yield {**asked, "exp_alerts": []}
        elif minute >= fires_by:
            job = {"job": "coordinator"} if "by (job)" in rule["expr"] else {}
            alert = {"exp_labels": {**rule["labels"], **job}, "exp_annotations": rule["annotations"]}
            yield {**asked, "exp_alerts": [alert]}


def test_grafana_finds_what_the_dashboard_names() -> None:
    sources = yaml.safe_load((PROVISIONING / "datasources" / "tandem.yml").read_text(encoding="utf-8"))
    assert {source["type"] for source in sources["datasources"]} == {"prometheus", "jaeger"}
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for source in sources["datasources"]:
        host = re.fullmatch(r"http://(\w+):\d+", source["url"])
        assert host is not None
        assert host[1] in compose
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "tandem.yml").read_text(encoding="utf-8"))[
        "providers"
    ]
    mounts = [volume.split(":")[:2] for volume in compose["grafana"]["volumes"]]
    assert ["./deploy/grafana/dashboards", provider["options"]["path"]] in mounts
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json"
VLLM_DASHBOARD = DASHBOARD.with_name("vllm.json")


ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"


RECORDED_MINUTES = 18
"""Of tests/deploy/recorded_series.yml, all of which are looked at."""


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def alerts() -> dict[str, str]:
    """The expression of each alert."""
    return {rule["alert"]: rule["expr"] for rule in alert_rules()}


def panels(dashboard: Path = DASHBOARD) -> list[dict[str, Any]]:
    """All panels without the titles of rows, which have no queries."""
    found = json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def filled(expression: str) -> str:
    """The query for all models, over a minute."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


def queries(dashboard: Path = DASHBOARD) -> list[str]:
    return [filled(target["expr"]) for panel in panels(dashboard) for target in panel["targets"]]

"""Checks of the dashboard and the alerts that need no process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
import yaml

from deploy.grafana.__main__ import dashboard
from deploy.grafana.preview import drawing
from tests.deploy.dashboard import DASHBOARD, panels, queries
from tests.paths import ROOT

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; it comes with Debian's package prometheus",
)


def check(*arguments: str) -> None:
    done = subprocess.run(["promtool", "check", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_file_is_what_panels_py_describes() -> None:
    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == dashboard(), "run python -m deploy.grafana"


def test_panels_have_words_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(column for column, _ in cells) < 24, panel["title"]
        taken |= cells


def test_every_series_has_a_name_of_its_own() -> None:
    for panel in panels():
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), panel["title"]
        assert len(set(legends)) == len(legends), panel["title"]


def test_the_drawing_names_every_series() -> None:
    drawn = dashboard()["panels"]
    for panel in drawn:
        for target in panel.get("targets", ()):
            # One series for each query, with a name as long as those of replicas.
            target["legendFormat"] = f"{target['legendFormat']} 10.77.0.2:50053"
            target["answer"] = [{"metric": {}, "values": [[0, "1"], [15, "0.5"]]}]
    picture = drawing(drawn)
    charts = [panel for panel in drawn if panel["type"] == "timeseries"]
    assert charts
    for panel in charts:
        for target in panel["targets"]:
            assert f">{escape(target['legendFormat'])}<" in picture


def test_no_placeholder_is_left_in_a_query() -> None:
    for query in queries():
        assert "$" not in query.expression, query.panel


@needs_promtool
def test_every_query_is_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": query.expression} for number, query in enumerate(queries())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    check("rules", str(path))


@needs_promtool
def test_prometheus_takes_its_configuration() -> None:
    check("config", str(ROOT / "deploy" / "prometheus" / "prometheus.yml"))


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

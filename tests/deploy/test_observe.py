"""A real Prometheus reaches every service, and every dashboard query returns data after a load."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose import services
from tests.deploy.containers import TEST_OPTIONS, Cluster, Container, why_not
from tests.deploy.images import Image
from tests.deploy.test_dashboard import filled, panels
from tests.end_to_end.processes import until
from tests.paths import HELD_OUT_PROMPTS, ROOT

PROMETHEUS = "/usr/bin/prometheus"
_CONFIG = ROOT / "deploy" / "prometheus"
_LOAD = """
import asyncio, json, sys, time
from tandem.clients.client import Client
from tandem.model.types import GenerationRequest

async def work(client, prompts, number, end):
    while time.monotonic() < end:
        text = prompts[number % len(prompts)]
        request = GenerationRequest(text, max_tokens=48, temperature=0.8 * (number % 2), seed=number)
        number += 2
        async for _ in client.generate(request):
            pass

async def main(prompts, seconds):
    async with Client("127.0.0.1:50051") as client:
        end = time.monotonic() + seconds
        await asyncio.gather(*(work(client, prompts, number, end) for number in range(4)))

asyncio.run(main(json.loads(sys.argv[1]), float(sys.argv[2])))
"""
_ASK = """
import json, sys, urllib.parse, urllib.request
answers = []
for path, arguments in json.loads(sys.argv[1]):
    url = f"http://prometheus:9090/{path}?" + urllib.parse.urlencode(arguments)
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
        answers.append(json.loads(text) if text.startswith("{") else text)
print(json.dumps(answers))
"""


def why_not_observed() -> str:
    """Why none of this can be done here; empty when it can."""
    if not Path(PROMETHEUS).exists():
        return "prometheus is not installed; it comes with Debian's package prometheus"
    return why_not()


def prometheus_image() -> Image:
    """Debian's Prometheus, started as the image of the compose file starts its own."""
    return Image(
        name="prometheus",
        files={},
        packages=set(),
        environment={"PATH": "/usr/bin:/bin"},
        user="65534:65534",
        workdir="/prometheus",
        entrypoint=[PROMETHEUS],
        health_check=[],
        ready="Server is ready to receive web requests",
    )


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := why_not_observed()), reason=why)]
SECONDS = float(os.environ.get("OBSERVE_SECONDS", "5"))
"""Duration of the load; `make observe-check` sets a longer one."""


@pytest.fixture(scope="module")
def cluster(images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The services of `docker compose --env-file deploy/observe.env up`, but for Grafana, Jaeger and the collector.

    Prometheus gets the very files of the repository, but for how often it asks, and without a name server, which these
    containers do not have.
    """
    folder = tmp_path_factory.mktemp("containers")
    config = folder / "prometheus"
    shutil.copytree(_CONFIG, config)
    text = (config / "prometheus.yml").read_text(encoding="utf-8")
    for was, test in (
        (r"scrape_(interval|timeout): \d+s", r"scrape_\1: 1s"),
        (r"dns_sd_configs: \[{names: \[([\w-]+)\].*", r'static_configs: [{targets: ["\1:9464"]}]'),
    ):
        text, count = re.subn(was, test, text)
        assert count > 1
    (config / "prometheus.yml").write_text(text, encoding="utf-8")
    wanted = services("observe", variables={"OPTIONS_FILE": str(TEST_OPTIONS)})
    for absent in ("grafana", "jaeger", "collector"):
        del wanted[absent]
    # Whatever pays on this machine, rounds are drafted ahead, so that their queries have data.
    for option, value in (("DRAFT_AHEAD", "8"), ("SPECULATION_POLICY", "fixed")):
        wanted["coordinator"]["environment"][f"TANDEM_COORDINATOR_{option}"] = value
    service = wanted["prometheus"]
    # The image's own command, and its volume as memory.
    service["command"] = ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
    assert service["volumes"][1] == "prometheus:/prometheus"
    service["volumes"] = [f"{config}:/etc/prometheus:ro"]
    service["tmpfs"] = ["/prometheus:mode=1777,size=256m"]
    service["healthcheck"] = {"test": ["CMD", "true"]}
    service["build"] = {"target": "prometheus"}
    with Cluster(wanted, {**images, "prometheus": prometheus_image()}, folder) as running:
        yield running


def ask(coordinator: Container, questions: list[tuple[str, dict[str, str]]]) -> list[Any]:
    """Return the answers of Prometheus to requests of its HTTP interface."""
    done = coordinator.run("python", "-c", _ASK, json.dumps(questions))
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def test_prometheus_reaches_every_service(cluster: Cluster) -> None:
    def healthy() -> set[str]:
        (answer,) = ask(cluster["coordinator"], [("api/v1/targets", {"state": "active"})])
        return {
            target["labels"]["job"] for target in answer["data"]["activeTargets"] if target["health"] == "up"
        }

    jobs = {"coordinator", "draft", "target"}
    until(lambda: healthy() == jobs, 30.0, lambda: cluster["prometheus"].process.story)
    assert healthy() == jobs, "and it stays so"


def test_every_dashboard_query_returns_data(cluster: Cluster) -> None:
    """As Grafana would ask, under four clients, greedy and sampling."""
    coordinator = cluster["coordinator"]
    entries = json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    prompts = json.dumps([entry["prompt"] for entry in entries[:40]])
    done = coordinator.run("python", "-c", _LOAD, prompts, str(SECONDS), seconds=SECONDS + 120)
    assert done.returncode == 0, done.stderr
    now = time.time()
    span = {"start": f"{now - SECONDS}", "end": f"{now}", "step": f"{max(1.0, SECONDS / 120)}"}
    targets = [(panel, target) for panel in panels() for target in panel.get("targets", [])]
    questions = []
    for _, target in targets:
        path, times = (
            ("api/v1/query", {"time": f"{now}"}) if target["instant"] else ("api/v1/query_range", span)
        )
        questions.append((path, {"query": filled(target["expr"]), **times}))
    empty = []
    for (panel, target), answer in zip(targets, ask(coordinator, questions), strict=True):
        found = answer["data"]["result"]
        values = [pair[1] for series in found for pair in series.get("values", [series.get("value")])]
        if not any(math.isfinite(float(value)) for value in values):
            empty.append(f"{panel['title']}: {target['expr']}")
    assert not empty, json.dumps(empty, indent=2)

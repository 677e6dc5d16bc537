"""A real Prometheus discovers every replica, and every dashboard query returns data after a load."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose import services
from tests.deploy.containers import TEST_OPTIONS, Cluster, Container, why_not
from tests.deploy.dashboard import filled, panels
from tests.deploy.images import Image
from tests.end_to_end.processes import until
from tests.paths import HELD_OUT_PROMPTS, ROOT

PROMETHEUS = "/usr/bin/prometheus"
_CONFIG = ROOT / "deploy" / "prometheus"
_LOAD = """
import asyncio, json, sys, time
from tandem.client import Client
from tandem.types import GenerationRequest

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
# In the place of the collector: takes OTLP as it does, and tells of each span.
_COLLECTOR = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace, trace_service_pb2_grpc

class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):
        for sent in request.resource_spans:
            name = next(one.value.string_value for one in sent.resource.attributes if one.key == "service.name")
            for scope in sent.scope_spans:
                for span in scope.spans:
                    print(span.trace_id.hex(), name, span.name, flush=True)
        return trace.ExportTraceServiceResponse()

class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def Export(self, request, context):
        return metrics.ExportMetricsServiceResponse()

server = grpc.server(ThreadPoolExecutor(2))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
server.add_insecure_port("0.0.0.0:4317")
server.start()
print("ready on 4317", flush=True)
server.wait_for_termination()
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


@contextmanager
def observed(
    images: Mapping[str, Image], folder: Path, scrape_seconds: int, options: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """Start everything that `docker compose --env-file deploy/observe.env up` starts and this machine has.

    Prometheus gets the very files of the repository, but for how often it asks. The collector is one of a page.
    """
    config = folder / "prometheus"
    shutil.copytree(_CONFIG, config)
    text = (config / "prometheus.yml").read_text(encoding="utf-8")
    for was in ("scrape_interval: 5s", "scrape_timeout: 4s"):
        assert was in text
        text = text.replace(was, f"{was.split(':')[0]}: {scrape_seconds}s")
    (config / "prometheus.yml").write_text(text, encoding="utf-8")
    variables = {"OTLP_ENDPOINT": "http://collector:4317", "OPTIONS_FILE": str(TEST_OPTIONS)}
    wanted = services("cpu", "observe", variables=variables)
    for absent in ("grafana", "jaeger"):
        del wanted[absent]
    collector = wanted["collector"]
    collector |= {
        "entrypoint": ["python", "-c", _COLLECTOR],
        "volumes": [],
        "healthcheck": {"test": ["CMD", "true"]},
    }
    collector["build"] = {"target": "coordinator"}
    service = wanted["prometheus"]
    # The image's own command, and its volume as memory.
    service["command"] = ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
    assert service["volumes"][1] == "prometheus:/prometheus"
    service["volumes"] = [f"{config}:/etc/prometheus:ro"]
    service["tmpfs"] = ["/prometheus:mode=1777,size=256m"]
    service["healthcheck"] = {"test": ["CMD", "true"]}
    service["build"] = {"target": "prometheus"}
    wanted["coordinator"]["environment"] |= options or {}
    with Cluster(wanted, {**images, "prometheus": prometheus_image()}, folder) as cluster:
        yield cluster


def load(coordinator: Container, seconds: float) -> None:
    """Four clients, greedy and sampling, for so long."""
    entries = json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    prompts = json.dumps([entry["prompt"] for entry in entries[:40]])
    done = coordinator.run("python", "-c", _LOAD, prompts, str(seconds), seconds=seconds + 120)
    assert done.returncode == 0, done.stderr


def ask(coordinator: Container, questions: list[tuple[str, dict[str, str]]]) -> list[Any]:
    """Return the answer of Prometheus to a request of its HTTP interface."""
    done = coordinator.run("python", "-c", _ASK, json.dumps(questions))
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def shown(coordinator: Container, window: str, seconds: float) -> list[dict[str, Any]]:
    """Every panel of the dashboard, with what Prometheus answers to each of its queries, as Grafana would ask it."""
    now = time.time()
    found = panels(with_rows=True)
    questions: list[tuple[str, dict[str, str]]] = []
    for panel in found:
        for target in panel.get("targets", []):
            expression = {"query": filled(target["expr"], window)}
            if target["instant"]:
                questions.append(("api/v1/query", expression | {"time": f"{now}"}))
            else:
                span = {"start": f"{now - seconds}", "end": f"{now}", "step": f"{max(1.0, seconds / 120)}"}
                questions.append(("api/v1/query_range", expression | span))
    answers = iter(ask(coordinator, questions))
    for panel in found:
        for target in panel.get("targets", []):
            target["answer"] = next(answers)["data"]["result"]
    return found


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := why_not_observed()), reason=why)]
SECONDS = float(os.environ.get("OBSERVE_SECONDS", "8"))
"""Duration of the load; `make observe-check` sets a longer one."""


@pytest.fixture(scope="module")
def cluster(images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with observed(images, tmp_path_factory.mktemp("containers"), scrape_seconds=1) as running:
        yield running


def test_prometheus_discovers_every_service(cluster: Cluster) -> None:
    def healthy() -> set[str]:
        (answer,) = ask(cluster["coordinator"], [("api/v1/targets", {"state": "active"})])
        return {
            target["labels"]["job"] for target in answer["data"]["activeTargets"] if target["health"] == "up"
        }

    jobs = {"coordinator", "draft", "target"}
    until(lambda: healthy() == jobs, 30.0, lambda: cluster["prometheus"].process.story)
    assert healthy() == jobs, "and it stays so"


def test_every_dashboard_query_returns_data(cluster: Cluster) -> None:
    load(cluster["coordinator"], SECONDS)
    empty = []
    for panel in shown(cluster["coordinator"], "1m", SECONDS):
        for target in panel.get("targets", []):
            values = [
                float(value)
                for series in target["answer"]
                for _, value in series.get("values", [series.get("value")])
            ]
            if not [value for value in values if math.isfinite(value)]:
                empty.append(f"{panel['title']}: {target['expr']}")
    assert not empty, json.dumps(empty, indent=2)


def test_one_trace_spans_all_three_services(cluster: Cluster) -> None:
    collector = cluster["collector"].process

    def traces() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for line in collector.stdout.splitlines():
            if len(words := line.split()) > 2 and words[1].startswith("tandem-"):
                found.setdefault(words[0], set()).add(words[1])
        return found

    whole = {"tandem-coordinator", "tandem-draft", "tandem-target"}
    until(lambda: whole in traces().values(), 30.0, lambda: collector.story)
    assert set.union(*traces().values()) == whole, "no other service sends spans"


def test_the_counters_agree_with_the_log(cluster: Cluster) -> None:
    """The counters behind the acceptance rate have the values of the log line."""
    names = ("tandem_spec_decode_num_accepted_tokens_total", "tandem_spec_decode_num_draft_tokens_total")
    questions = [("api/v1/query", {"query": f"sum({name})"}) for name in names]
    accepted, drafted = (
        float(answer["data"]["result"][0]["value"][1]) for answer in ask(cluster["coordinator"], questions)
    )
    assert 0.2 < accepted / drafted < 0.95
    assert cluster["coordinator"].process.stop() == 0
    lines = [line for line in cluster["coordinator"].process.stderr.splitlines() if "Draft Tokens: " in line]
    assert lines

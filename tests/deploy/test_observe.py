"""A real Prometheus discovers every replica, and every dashboard query returns data after a load."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator

import pytest

from tests.deploy.containers import Cluster
from tests.deploy.images import Image
from tests.deploy.observed import ask, load, observed, shown, why_not_observed
from tests.end_to_end.processes import until

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

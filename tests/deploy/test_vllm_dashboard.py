"""The dashboard of a vLLM with our drafts asks only for metrics that there are."""

from __future__ import annotations

import json
import re

from prometheus_client import CollectorRegistry

from deploy.grafana.__main__ import VLLM_DASHBOARD, vllm_dashboard
from tandem.integrations.vllm.metrics import Counts, CountsCollector, wait_histogram

VLLM_METRICS = {
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
}
"""As vLLM 0.32 names them (`vllm/v1/spec_decode/metrics.py`, `vllm/v1/metrics/loggers.py`)."""


def test_the_file_is_what_vllm_panels_py_describes() -> None:
    assert json.loads(VLLM_DASHBOARD.read_text(encoding="utf-8")) == vllm_dashboard(), (
        "run python -m deploy.grafana"
    )


def test_every_query_asks_for_metrics_that_there_are() -> None:
    registry = CollectorRegistry()
    registry.register(CountsCollector(Counts(), lambda: 0))
    wait_histogram(registry)
    ours = {sample.name for family in registry.collect() for sample in family.samples}
    asked = set()
    for panel in vllm_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            asked |= set(re.findall(r"\b(?:vllm:|tandem_)\w+", target["expr"]))
    assert asked & ours, "none of our own metrics is shown"
    assert asked <= ours | VLLM_METRICS

"""The metrics endpoint, and an unreachable collector."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from tandem.errors import ConfigurationError
from tandem.telemetry.metrics import AtScrape
from tandem.telemetry.process import Failures, Telemetry
from tandem.telemetry.settings import TelemetryOptions, telemetry_for
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "TRACES_", "METRICS_"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)


async def test_metrics_are_served() -> None:
    telemetry = Telemetry(TelemetryOptions(prometheus_port=0), "target")
    telemetry.start()
    url = f"http://127.0.0.1:{telemetry.prometheus_port}/metrics"
    try:
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=5) as response:
            text = response.read().decode()
    finally:
        await telemetry.close()
    assert 'tandem_build_info{service="target"' in text
    assert "process_cpu_seconds_total" in text
    assert "_created" not in text


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        telemetry = Telemetry(TelemetryOptions(prometheus_port=port), "draft")
        with pytest.raises(
            ConfigurationError, match=rf"cannot serve metrics on 127\.0\.0\.1:{port}: .*--prometheus-port"
        ):
            telemetry.start()
        await telemetry.close()


def test_telemetry_is_off_without_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry_for(TelemetryOptions(), "draft") is None
    assert telemetry_for(TelemetryOptions(), "coordinator", is_read=True) is not None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert telemetry_for(TelemetryOptions(), "draft") is None


def test_without_telemetry_its_libraries_are_not_even_imported() -> None:
    code = (
        "import sys, coordinator.__main__, draft_service.__main__, target_service.__main__\n"
        "from coordinator.service import CoordinatorService\n"
        "from coordinator.settings.coordinator import CoordinatorSettings\n"
        "from draft_service.settings import DraftSettings\n"
        "from draft_service.service import DraftService\n"
        "CoordinatorService(CoordinatorSettings(target_address='127.0.0.1:1'))\n"
        "DraftService(DraftSettings(speculative_method='ngram'))\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'opentelemetry', 'prometheus_client'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("accepts", [False, True], ids=["nobody listens", "it never answers"])
async def test_an_unreachable_collector_costs_a_log_line_and_no_time(
    caplog: pytest.LogCaptureFixture, accepts: bool
) -> None:
    """Spans and metrics are dropped, and the exit is delayed by at most two seconds."""
    caplog.set_level(logging.WARNING)
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if accepts:
            collector.listen()
        await _end_with_collector_gone(f"http://127.0.0.1:{collector.getsockname()[1]}")
    ours = [record for record in caplog.records if record.name.startswith("tandem")]
    assert len(ours) <= 1
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def _end_with_collector_gone(endpoint: str) -> None:
    telemetry = Telemetry(TelemetryOptions(otlp_endpoint=endpoint), "coordinator")
    telemetry.start()
    assert telemetry.tracer is not None
    for _ in range(5_000):  # more than the queue holds
        telemetry.tracer.start_span("text_completion").end()
    began = time.monotonic()
    await telemetry.close()
    assert time.monotonic() - began < 2.0


def test_warnings_are_rare_and_losses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    failures = Failures(registry)
    for _ in range(10):
        failures.count("traces")
    failures.count("metrics")
    assert len(caplog.messages) == 1
    name = "tandem_telemetry_export_failures_total"
    assert registry.get_sample_value(name, {"signal": "traces"}) == 10
    assert registry.get_sample_value(name, {"signal": "metrics"}) == 1


def test_nothing_is_written_to_a_log_that_may_be_closed(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(CollectorRegistry())
    failures.mute()
    failures.count("traces")
    assert caplog.messages == []


def read_at_scrape(read: Callable[[], int]) -> Callable[[], int | None]:
    return AtScrape(read, lambda _: ()).value


async def test_values_of_the_event_loop_are_read_on_it() -> None:
    read = read_at_scrape(threading.get_ident)
    here = threading.get_ident()
    assert read() == here
    assert await asyncio.to_thread(read) == here


async def test_an_error_in_reading_reaches_the_reader() -> None:
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(read_at_scrape(lambda: 1 // 0))


def test_a_loop_that_has_ended_says_nothing() -> None:
    async def make() -> Callable[[], int | None]:
        return read_at_scrape(lambda: 1)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(asyncio.run(make())).result() is None

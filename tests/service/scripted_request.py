"""The request of the telemetry tests, whose every round is known, and access to the spans and metrics it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from tandem.types import GenerationRequest
from tests.service.clients import until
from tests.service.fakes import counting
from tests.service.telemetry_cluster import ObservedCluster

REQUEST = GenerationRequest((5, 6, 7), max_tokens=8, temperature=0.0, seed=3)


# With `wrong_after_twelve` the rounds are: 8; 9 and 10 accepted, bonus 11; 12 accepted, 13 recovered; 14 accepted (the
# length leaves no room for more), bonus 15.
COMPLETION = [8, 9, 10, 11, 12, 13, 14, 15]


MODEL = {"model_name": "fake"}


def wrong_after_twelve(tokens: Sequence[int]) -> int:
    """Count along with the target, except after 12."""
    return 0 if tokens[-1] == 12 else counting(tokens)


def wrong_after_eleven(tokens: Sequence[int]) -> int:
    """Count along with the target, except after 11."""
    return 0 if tokens[-1] == 11 else counting(tokens)


def only_span(name: str, spans: Sequence[ReadableSpan], kind: SpanKind | None = None) -> ReadableSpan:
    """Return the one span of this name (and kind)."""
    (span,) = (span for span in spans if span.name == name and kind in (None, span.kind))
    return span


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the sample of this metric of the fake model, None where there is none."""
    return registry.get_sample_value(f"tandem_{name}", MODEL | labels)


async def all_ended(cluster: ObservedCluster, count: int) -> None:
    """Wait until this many spans have ended."""
    await until(lambda: len(cluster.spans) >= count, 5.0, lambda: str([span.name for span in cluster.spans]))

"""Small things about spans that the coordinator and the services share."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.errors import InvalidRequestError, TandemError, status_code

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context:
    """The trace context that a caller sent; an empty one when it sent none or an invalid one."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def traceparent_of(span: Span) -> str:
    """W3C trace context that makes another process's span a child of this one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def under(span: Span) -> Context:
    """The context of the span's children."""
    return set_span_in_context(span, Context())


def rpc_span(
    tracer: Tracer, role: str, kind: SpanKind, context: Context, attributes: Mapping[str, str | int]
) -> Span:
    """The span of a stream to a draft or a target, at either of its ends."""
    service, method = ("DraftService", "Propose") if role == "draft" else ("TargetService", "Verify")
    service = f"tandem.v1.{service}"
    ours = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    return tracer.start_span(f"{service}/{method}", context, kind, {**ours, **attributes})


def error_type(error: BaseException) -> str:
    """A short name of an error's kind: its status code."""
    if isinstance(error, TandemError):
        return status_code(error).name.lower()
    return "internal" if isinstance(error, Exception) else "cancelled"


def mark_error(span: Span, error: BaseException) -> None:
    """Mark a span as ended with an error. Only messages of Tandem's own errors, which are meant for users, are
    recorded, and none that refuses a request: it may quote what the client sent."""
    is_quotable = isinstance(error, TandemError) and not isinstance(error, InvalidRequestError)
    span.set_attribute("error.type", error_type(error))
    span.set_status(Status(StatusCode.ERROR, str(error) if is_quotable else ""))

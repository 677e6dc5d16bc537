"""`/openapi.json`, generated from the classes of the bodies, and `/docs`, a page of it that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from coordinator.http.schema import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, TokenizeBody
from tandem import __version__

_BODIES = {
    "/v1/completions": (CompletionBody, "Complete a prompt, or several"),
    "/v1/chat/completions": (ChatBody, "Answer a chat"),
    "/v1/responses": (ResponsesBody, "OpenAI's Responses API, for plain text"),
    "/tokenize": (TokenizeBody, "The token ids of a prompt or a chat"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}
_GETS = {
    "/v1/models": "The model that is served",
    "/health": "200, or 503 while it starts or drains; needs no token",
    "/ping": "The same under the name that SageMaker asks for",
    "/load": "How many requests run and wait",
    "/version": "The version",
    "/metrics": "All metrics in Prometheus's text form",
    "/tandem/status": "Replicas, load, statistics",
}
_STYLE = (
    ":root{color-scheme:light dark}body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;border-bottom:1px solid #8886;padding:.3rem .6rem .3rem 0}"
)


@cache
def description() -> dict[str, Any]:
    """The API in OpenAPI's form."""
    models: Any = [(model, "validation") for model, _ in _BODIES.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    answered = {"200": {"description": "the answer"}}
    paths: dict[str, Any] = {}
    for path, (model, summary) in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": answered | {"400": {"description": "a rule is broken"}},
            }
        }
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": answered}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": __version__,
            "description": "OpenAI's API, and some of vLLM's.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def field_rows() -> Iterator[tuple[str, str, str]]:
    """Each field of a completion: its name, the endpoint (both, completions, chat), and its meaning."""
    completions, chat = CompletionBody.model_fields, ChatBody.model_fields
    for name, field in {**completions, **chat}.items():
        if name in completions and name in chat and completions[name].description == field.description:
            yield name, "both", field.description or ""
            continue
        for endpoint, fields in (("completions", completions), ("chat", chat)):
            if name in fields:
                yield name, endpoint, fields[name].description or ""


async def document(request: Request) -> Response:
    """`GET /openapi.json`."""
    return JSONResponse(description())


async def page(request: Request) -> Response:
    """`GET /docs`."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(_html(), headers=headers)


@cache
def _html() -> str:
    paths = [("POST", path, summary) for path, (_, summary) in _BODIES.items()]
    paths += [("GET", path, summary) for path, summary in _GETS.items()]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Tandem: the API</title><style>{_STYLE}</style><h1>Tandem {html.escape(__version__)}</h1>"
        f"<p>Machine-readable: <a href=/openapi.json>openapi.json</a>. Try it: <a href=/>the page</a>.</p>"
        f"<h2>Paths</h2>{_table(('method', 'path', 'meaning'), paths)}"
        f"<h2>Fields of a completion</h2>{_table(('field', 'endpoint', 'meaning'), list(field_rows()))}</html>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}" for text in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"

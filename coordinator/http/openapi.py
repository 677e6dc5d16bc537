"""`/openapi.json`, generated from the classes of the bodies, and `/docs`, a page of it that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from coordinator.http import schema
from tandem import __version__

PAGE = Path(__file__).with_name("page")
"""Folder of the pages' files."""

ENDPOINTS: tuple[tuple[str, str, str, str, type[schema.Body] | None], ...] = (
    ("POST", "/v1/completions", "complete", "Complete a prompt, or several", schema.CompletionBody),
    ("POST", "/v1/chat/completions", "complete", "Answer a chat", schema.ChatBody),
    ("POST", "/v1/responses", "complete", "OpenAI's Responses API, for plain text", schema.ResponsesBody),
    ("POST", "/tokenize", "tokenize", "The token ids of a prompt or a chat", schema.TokenizeBody),
    ("POST", "/detokenize", "detokenize", "The text of token ids", schema.DetokenizeBody),
    ("GET", "/v1/models", "models", "The model that is served", None),
    ("GET", "/health", "health", "200, or 503 while it starts or drains; needs no token", None),
    ("GET", "/ping", "health", "The same under the name that SageMaker asks for", None),
    ("GET", "/load", "load", "How many requests run and wait", None),
    ("GET", "/version", "version", "The version", None),
    ("GET", "/metrics", "metrics_text", "All metrics in Prometheus's text form", None),
    ("GET", "/tandem/status", "page_status", "Replicas, load, statistics", None),
)
"""Method, path, the `App`'s method that answers, summary, and the class of the body."""


@cache
def description() -> dict[str, Any]:
    """The API in OpenAPI's form."""
    models: Any = [(body, "validation") for *_, body in ENDPOINTS if body is not None]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for method, path, _, summary, body in ENDPOINTS:
        described: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "the answer"}}}
        if body is not None:
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
            described["requestBody"] = {"required": True, "content": content}
            described["responses"]["400"] = {"description": "a rule is broken"}
        paths[path] = {method.lower(): described}
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
    completions, chat = schema.CompletionBody.model_fields, schema.ChatBody.model_fields
    for name, field in {**completions, **chat}.items():
        if name in completions and name in chat and completions[name].description == field.description:
            yield name, "both", field.description or ""
            continue
        for endpoint, fields in (("completions", completions), ("chat", chat)):
            if name in fields:
                yield name, endpoint, fields[name].description or ""


@cache
def page() -> str:
    """The page at `/docs`."""
    import jinja2  # only for whoever reads the page

    template = jinja2.Template((PAGE / "docs.html").read_text(encoding="utf-8"), autoescape=True)
    paths = [(method, path, summary) for method, path, _, summary, _ in ENDPOINTS]
    rendered: str = template.render(version=__version__, paths=paths, fields=list(field_rows()))
    return rendered

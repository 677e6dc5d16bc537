"""`/openapi.json`, generated from the classes of the bodies, and `/docs`, a page of it that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from coordinator.http.schema import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, TokenizeBody
from tandem import __version__

PAGE = Path(__file__).with_name("page")
"""Folder of the pages' files."""

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


@cache
def page() -> str:
    """The page at `/docs`."""
    import jinja2  # only for whoever reads the page

    template = jinja2.Template((PAGE / "docs.html").read_text(encoding="utf-8"), autoescape=True)
    paths = [("POST", path, summary) for path, (_, summary) in _BODIES.items()]
    paths += [("GET", path, summary) for path, summary in _GETS.items()]
    rendered: str = template.render(version=__version__, paths=paths, fields=list(field_rows()))
    return rendered

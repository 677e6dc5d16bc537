"""Options of the coordinator's HTTP side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tandem.config.options import Options
from tandem.config.rule import Rule
from tandem.serving.protection import exposure


class HttpOptions(Options):
    """HTTP beside gRPC, off unless it has a port. TLS and tokens are those of the server."""

    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for HTTP: OpenAI's API, /metrics and a page to try it on; 0 takes any free one. By default there is none."""
    http_host: str = "127.0.0.1"
    """Address to listen on for HTTP."""
    http_max_connections: int = Field(default=1024, ge=1)
    """Maximum HTTP connections at once; others are answered with 503."""
    http_max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """Maximum bytes of a request's body."""
    http_max_held_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Maximum bytes of bodies that have not come whole, over all connections; the first 64 KiB of each are free."""
    http_max_held_answer_bytes: int = Field(default=256 << 20, ge=1024)
    """Maximum bytes of answers that are not streamed, over all connections; the first 64 KiB of each are free."""
    served_model_name: str | None = None
    """Name of the model in OpenAI's API. By default the name of the target's folder. Name and meaning are vLLM's."""
    chat_template: Path | None = None
    """Jinja template for chats, in place of the model's own. Name and meaning are vLLM's."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Treatment of unknown request fields: refuse them by name, or ignore them, log each once, and name
    it in the header X-Tandem-Ignored."""
    cors_origin: str | None = None
    """Origins whose web pages may call HTTP, such as https://chat.example, with commas between them; * for all. By
    default none may."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for these options."""
        return (*super().rules(), *HTTP_OPTION_RULES)


def _exposure(settings: Any) -> Iterator[str]:
    if settings.http_port is not None:
        yield from exposure(settings, settings.http_host, "http_host")


def origins(text: str | None) -> list[str]:
    """Each of the origins in an option's text."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


_ORIGIN = re.compile(r"\*|https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]+)?")


def _cors(settings: Any) -> Iterator[str]:
    for origin in origins(settings.cors_origin):
        if not _ORIGIN.fullmatch(origin):
            yield f"cors_origin is {origin}; it must be * or scheme://host:port, such as https://chat.example"


def _held_bodies(settings: Any) -> Iterator[str]:
    if settings.http_max_held_body_bytes < settings.http_max_body_bytes:
        yield (
            f"http_max_held_body_bytes is {settings.http_max_held_body_bytes}; it must be at least "
            f"http_max_body_bytes ({settings.http_max_body_bytes}), or the largest body is never taken"
        )


HTTP_OPTION_RULES: tuple[Rule[Any], ...] = (
    Rule("cors-origin", "`cors_origin` is `*` or origins: `scheme://host:port`.", _cors, ("cors_origin",)),
    Rule(
        "http-held-bodies",
        "`http_max_held_body_bytes` is at least `http_max_body_bytes`.",
        _held_bodies,
        ("http_max_held_body_bytes", "http_max_body_bytes"),
    ),
    Rule(
        "http-exposure",
        "With an `http_host` that other machines reach, the server has TLS and asks who calls, or is `insecure`.",
        _exposure,
        ("http_host", "http_port"),
    ),
)

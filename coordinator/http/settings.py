"""Options of the coordinator's HTTP side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """Most HTTP connections at once; more are told that the server is busy."""
    http_max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """Most bytes of a request's body."""
    served_model_name: str | None = None
    """Name of the model in OpenAI's API. By default the name of the target's folder. Name and meaning are vLLM's."""
    chat_template: Path | None = None
    """Jinja template that makes a prompt of a chat, in place of the model's own. Name and meaning are vLLM's."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """What must hold for these options."""
        return (*super().rules(), *HTTP_OPTION_RULES)


def _exposure(settings: Any) -> Iterator[str]:
    if settings.http_port is not None:
        yield from exposure(settings, settings.http_host, "http_host")


HTTP_OPTION_RULES: tuple[Rule[Any], ...] = (
    Rule(
        "http-exposure",
        "With an `http_host` that other machines reach, the server has TLS and asks who calls, or is `insecure`.",
        _exposure,
        ("http_host", "http_port"),
    ),
)

"""The coordinator's own settings, and the configuration that it checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from coordinator.settings.combinations import COMBINATION_RULES
from coordinator.settings.http import HttpOptions
from coordinator.settings.request_bounds import RequestBounds
from coordinator.settings.service_access import ServiceAccessOptions
from tandem.config import SpeculativeConfig
from tandem.config.rule import Rule
from tandem.rpc.resolver import split_addresses
from tandem.serving.protection import AdminOptions, is_loopback
from tandem.settings import COMMAND_LINE, ServerSettings

DEFAULT_PORT = 50051


def _one_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _checked(text: str) -> str:
    addresses = split_addresses(text)
    if not addresses:
        raise ValueError("names no address; give host:port, or several with commas between them")
    return ",".join(map(str, addresses))


Addresses = Annotated[str, BeforeValidator(_one_text), AfterValidator(_checked)]
"""Addresses of a service's replicas with commas between them; a list becomes such a text."""


class CheckedSpeculativeConfig(SpeculativeConfig):
    """`SpeculativeConfig`, checked as far as possible without a service."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the configuration alone, including the needs of the acceptance rules."""
        return (*super().rules(), *COMBINATION_RULES)


class CoordinatorSettings(
    CheckedSpeculativeConfig, RequestBounds, ServiceAccessOptions, HttpOptions, AdminOptions, ServerSettings
):
    """Join a draft service and a target service."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_COORDINATOR_")

    repeatable: ClassVar = ("target_address", "draft_address", "cors_origin")
    """Options that may be given several times on a command line."""

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that share the ports. The bounds on requests, streams and HTTP are divided among them. Tandem's
    own."""
    target_address: Addresses
    """host:port of the target service, or several with commas between them. A name stands for all of its addresses,
    and is looked up again every `resolve_interval_seconds`."""
    draft_address: Addresses | None = None
    """Addresses of the draft service. Without one the target works alone."""
    speculation: bool = True
    """Let drafts propose. Off: the target works alone, through the same path. Tandem's own."""
    resolve_interval_seconds: float = Field(default=5.0, gt=0)
    """Interval at which names of services are resolved again."""
    target_wait_seconds: float = Field(default=30.0, ge=0)
    """How long a request waits when no target is ready, at its start or later."""
    verification_timeout_seconds: float | None = Field(default=None, gt=0)
    """How long a target may leave a verification without an answer before the sequence moves to another target. By
    default eight times as long as the slowest recent answers, at least 10 s, and longer while it reads prompts."""
    draft_patience_seconds: float | None = Field(default=None, gt=0)
    """How long a round waits for a proposal before the target goes on alone. By default the draft's usual time plus
    four verifications, between 0.25 and 0.8 s."""
    speculation_policy: Literal["adaptive", "fixed"] = "adaptive"
    """adaptive: each round proposes the number of tokens, from 0 to num_speculative_tokens, that promises the most
    tokens per second at the current load. fixed: always num_speculative_tokens, for benchmarks. Tandem's own."""
    draft_ahead: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """How far the draft works ahead while the target verifies. auto: for as many outcomes of a verification as pay,
    none included. off: not at all. A number: always for so many outcomes. Tandem's own."""
    stream_interval: int = Field(default=1, ge=1, le=1024)
    """Tokens of a streamed chunk: it joins rounds until it has so many. The first tokens and the end are sent at once,
    and so is what there is when a stream pauses. 1: each round is a chunk. vLLM's name."""
    trace_rounds: float = Field(default=0.0, ge=0, le=1)
    """Share of the traced requests that have a span for each round."""
    measure_waits: bool = False
    """Measure how long rounds wait inside the coordinator: the metric `tandem_round_wait_seconds`. A thread wakes the
    event loop every 5 ms for that. Tandem's own."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long to wait at start until the other services are ready."""

    @property
    def certificate_files(self) -> tuple[Path, ...]:
        """Files of certificates that the process uses, including those for its services."""
        towards_services = (self.service_tls_cert_file, self.service_tls_ca_file)
        return (*super().certificate_files, *(path for path in towards_services if path is not None))

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the coordinator's options alone."""
        return (*super().rules(), *COORDINATOR_RULES)


def _plain_connections(settings: CoordinatorSettings) -> Iterator[str]:
    if settings.insecure or settings.service_credentials.uses_tls:
        return
    for option in ("target_address", "draft_address"):
        for address in split_addresses(getattr(settings, option) or ""):
            if address.port >= 0 and not is_loopback(address.host):
                yield (
                    f"{option} is {address}, another machine, and prompts would go there in plain text: give "
                    "service_tls_ca_file or service_tls, or insecure where the network is trusted"
                )


def _too_few_places(settings: CoordinatorSettings) -> Iterator[str]:
    if settings.max_concurrent_requests < settings.workers:
        yield (
            f"max_concurrent_requests is {settings.max_concurrent_requests}; it must be at least workers "
            f"({settings.workers}), which divide it"
        )


COORDINATOR_RULES: tuple[Rule[CoordinatorSettings], ...] = (
    Rule(
        "workers",
        "`max_concurrent_requests` is at least `workers`.",
        _too_few_places,
        ("workers", "max_concurrent_requests"),
    ),
    Rule(
        "service-tls",
        "Services on other machines are reached by TLS, or the coordinator is `insecure`.",
        _plain_connections,
        ("target_address", "draft_address"),
    ),
)


class ConfigSettings(CoordinatorSettings):
    """The settings as `tandem config` reads them, which needs no running service."""

    target_address: Addresses | None = None  # type: ignore[assignment]
    """host:port of the target service."""

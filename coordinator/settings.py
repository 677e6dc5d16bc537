"""The coordinator's own settings, and the configuration whose guardian it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from coordinator.addresses import split_addresses
from coordinator.bounds import RequestBounds
from coordinator.http.settings import HttpOptions
from coordinator.rules import COMBINATION_RULES
from coordinator.service_access import ServiceAccessOptions
from tandem.config import SpeculativeConfig
from tandem.config.rule import Rule
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
"""Addresses of a service's replicas with commas between them; a list of them is made one text."""


class GuardedConfig(SpeculativeConfig):
    """`SpeculativeConfig`, held to all that can be known without a service."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """What must hold for the configuration alone, the acceptance rules' needs included."""
        return (*super().rules(), *COMBINATION_RULES)


class CoordinatorSettings(
    GuardedConfig, RequestBounds, ServiceAccessOptions, HttpOptions, AdminOptions, ServerSettings
):
    """Join a draft service and a target service."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_COORDINATOR_")

    repeatable: ClassVar = ("target_address", "draft_address")
    """Options that may be given several times on a command line."""

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    target_address: Addresses
    """host:port of the target service; of several, with commas between them, when it has replicas. A name stands for
    all of its addresses, and is looked up again and again."""
    draft_address: Addresses | None = None
    """The same of the draft service. Without one the target works alone."""
    speculation: bool = True
    """Whether drafts propose at all. Off: the target alone, through the same path. Tandem's own."""
    resolve_interval_seconds: float = Field(default=5.0, gt=0)
    """How often names of services are looked up, so that replicas are found and missed."""
    target_wait_seconds: float = Field(default=30.0, ge=0)
    """How long a request waits for a target when none is ready, at its start or in its middle."""
    draft_patience_seconds: float | None = Field(default=None, gt=0)
    """How long a round waits for a proposal before the target goes on alone. By default the draft's usual time and
    four verifications more, between 0.25 and 0.8 s."""
    draft_pause: bool = True
    """Leave the draft out of a request for a while when, by its measured cost and acceptance, it does not pay; shorten
    the proposals of all where many run at once and shorter ones are measured to be faster."""
    trace_rounds: float = Field(default=0.0, ge=0, le=1)
    """Share of the traced requests that have a span for each round."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long to wait at start for the other services to be ready."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """What must hold for the coordinator's options alone."""
        return (*super().rules(), *COORDINATOR_RULES)


def _plain_connections(settings: CoordinatorSettings) -> Iterator[str]:
    if settings.insecure or settings.service_credentials.uses_tls:
        return
    for option in ("target_address", "draft_address"):
        for address in split_addresses(getattr(settings, option) or ""):
            if address.port >= 0 and not is_loopback(address.host):
                yield (
                    f"{option} is {address}, another machine, and prompts would go there in plain text: give "
                    "service_tls_ca_file or service_tls; or insecure, where the network is trusted"
                )


COORDINATOR_RULES: tuple[Rule[CoordinatorSettings], ...] = (
    Rule(
        "service-tls",
        "Services on other machines are reached by TLS, or the coordinator is `insecure`.",
        _plain_connections,
        ("target_address", "draft_address"),
    ),
)


class ConfigSettings(CoordinatorSettings):
    """The same as `tandem config` looks at it, which needs no service to be there."""

    target_address: Addresses | None = None  # type: ignore[assignment]
    """host:port of the target service."""

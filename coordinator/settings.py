"""The coordinator's own settings, and the configuration whose guardian it is."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from coordinator.bounds import RequestBounds
from coordinator.rules import COMBINATION_RULES
from coordinator.service_access import ServiceAccessOptions
from tandem.config import SpeculativeConfig
from tandem.config.rule import Rule
from tandem.serving.protection import AdminOptions
from tandem.settings import COMMAND_LINE, ServerSettings

DEFAULT_PORT = 50051


class GuardedConfig(SpeculativeConfig):
    """`SpeculativeConfig`, held to all that can be known without a service."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """What must hold for the configuration alone, the acceptance rules' needs included."""
        return (*super().rules(), *COMBINATION_RULES)


class CoordinatorSettings(GuardedConfig, RequestBounds, ServiceAccessOptions, AdminOptions, ServerSettings):
    """Join a draft service and a target service."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_COORDINATOR_")

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    target_address: str
    """host:port of the target service."""
    draft_address: str | None = None
    """host:port of the draft service. Without one the target works alone."""
    speculation: bool = True
    """Whether drafts propose at all. Off: the target alone, through the same path. Tandem's own."""
    draft_patience_seconds: float = Field(default=1.0, gt=0)
    """How long a round waits for a proposal before the target goes on alone."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long to wait at start for the other services to be ready."""


class ConfigSettings(CoordinatorSettings):
    """The same as `tandem config` looks at it, which needs no service to be there."""

    target_address: str | None = None  # type: ignore[assignment]
    """host:port of the target service."""

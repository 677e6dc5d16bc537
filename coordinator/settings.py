"""The coordinator's own settings."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import COMMAND_LINE, ServerSettings

DEFAULT_PORT = 50051


class CoordinatorSettings(ServerSettings):
    """Join a draft service and a target service."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_COORDINATOR_")

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    target_address: str
    """host:port of the target service."""
    draft_address: str | None = None
    """host:port of the draft service. Without one the target works alone."""
    num_speculative_tokens: int = Field(default=2, ge=1)
    """Tokens proposed per verification, unless a request says otherwise. MAX's name and default."""
    rejection_sampling_strategy: str | None = None
    """Acceptance rule, unless a request says otherwise. MAX's name; by default residual."""
    draft_top_k: int = Field(default=0, ge=0)
    """How many of its most probable tokens the draft chooses among; 0 leaves it to the draft service."""
    draft_patience_seconds: float = Field(default=1.0, gt=0)
    """How long a round waits for a proposal before the target goes on alone."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long to wait at start for the other services to be ready."""

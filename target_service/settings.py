"""The target service's settings."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import COMMAND_LINE, ModelServerSettings

DEFAULT_PORT = 50052


class TargetSettings(ModelServerSettings):
    """Serve a target model."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_TARGET_")

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""

"""The draft service's settings."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import COMMAND_LINE, ModelServerSettings

DEFAULT_PORT = 50053


class DraftSettings(ModelServerSettings):
    """Serve a draft model."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_DRAFT_")

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    draft_top_k: int = Field(default=64, ge=1)
    """How many of its most probable tokens the draft chooses among when its distribution travels with them."""

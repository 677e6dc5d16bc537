"""The plug-in's options. All come from the environment: vLLM has no command line for a proposer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.config.rule import Rules
from tandem.config.settings import FilledSettings, load_settings
from tandem.errors import ConfigurationError
from tandem.telemetry.settings import TelemetryOptions
from tandem_coordinator.drafting import Addresses, ServiceAccessOptions, SharingOptions, encryption_rule

ENVIRONMENT_PREFIX = "TANDEM_VLLM_"


class VllmSettings(SharingOptions, ServiceAccessOptions, TelemetryOptions, FilledSettings):
    """Draft for a stock vLLM from Tandem's draft services."""

    env_prefix: ClassVar = ENVIRONMENT_PREFIX

    draft_address: Addresses | None = None
    """host:port of the draft service, or several with commas between them. A name stands for all of its addresses,
    and is looked up again every `resolve_interval_seconds`."""
    draft_ahead: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Outcomes for which the draft works ahead while vLLM computes. auto: it is measured whether that pays. off: none.
    A number: always this many."""
    draft_patience_seconds: float | None = Field(default=None, gt=0)
    """How long a step of vLLM waits for proposals. By default what the accepted tokens save, by the time of vLLM's own
    steps: the mean number of accepted tokens times the mean step, at most 0.5 s."""
    start_wait_seconds: float = Field(default=10.0, ge=0)
    """How long vLLM's start waits for the first draft, so that a wrong one is reported at once. vLLM starts without."""
    resolve_interval_seconds: float = Field(default=5.0, gt=0)
    """Interval at which names of services are resolved again."""
    insecure: bool = False
    """Reach drafts on other machines without TLS, because the network is trusted."""

    own_rules: ClassVar[Rules] = (
        encryption_rule(
            "plug-in",
            f"set {ENVIRONMENT_PREFIX}SERVICE_TLS_CA_FILE or {ENVIRONMENT_PREFIX}SERVICE_TLS, or "
            f"{ENVIRONMENT_PREFIX}INSECURE=true",
            "draft_address",
        ),
    )


def read_settings() -> VllmSettings:
    """The settings that the environment holds."""
    settings = load_settings(VllmSettings, (), "vllm")
    if settings.draft_address is None:
        raise ConfigurationError(
            f"{ENVIRONMENT_PREFIX}DRAFT_ADDRESS is not set; it must name the draft service as host:port"
        )
    return settings

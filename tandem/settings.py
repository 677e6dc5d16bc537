"""How a process is set up: settings classes filled from the command line, the environment and defaults.

Each option is a field of one class; the command line, its help and the environment are made from it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, PrivateAttr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tandem.config.layers import Origin, merged, origins, read_layers
from tandem.config.options import SENTENCE, Options
from tandem.config.rule import Rule
from tandem.errors import ConfigurationError
from tandem.logs import LogFormat, LogLevel
from tandem.serving.protection import ProtectionOptions, exposure
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

DataTypeName = Literal["auto", "float32", "bfloat16", "float16"]
CompileMode = Literal["auto", "on", "off"]

COMMAND_LINE = SettingsConfigDict(
    extra="forbid",
    frozen=True,
    use_attribute_docstrings=True,
    cli_kebab_case=True,
    cli_implicit_flags=True,
    cli_hide_none_type=True,
    cli_avoid_json=True,
    cli_exit_on_error=False,
)
"""What every settings class shares. A class adds its `env_prefix`."""


class FilledSettings(Options, BaseSettings):
    """Settings that `load_settings` fills. Made directly, they are what they are made with and nothing else."""

    model_config = COMMAND_LINE

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """For each option that any place named: which one decided. Empty unless `load_settings` made this."""
        return self._origins

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is given: `tandem.config.layers` knows the strength of each place, and keeps track of it."""
        return (init_settings,)


class ServerSettings(TelemetryOptions, ProtectionOptions, FilledSettings):
    """What every server needs."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    drain_timeout_seconds: float = Field(default=30.0, ge=0)
    """After SIGTERM, how long running work may go on before it is cut off. A second signal ends the process at once."""
    stalled_reader_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long a stream may wait for its reader to take more before it is ended."""
    max_concurrent_streams: int = Field(default=2048, ge=1)
    """Most calls of any kind at once; more are refused at once."""
    log_level: LogLevel = "info"
    """Least severe log line to write."""
    log_format: LogFormat = "text"
    """Form of a log line."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """What must hold for a server's options."""
        return (*super().rules(), *SERVER_RULES)


SERVER_RULES: tuple[Rule[ServerSettings], ...] = (
    Rule(
        "exposure",
        "With a `host` that other machines reach, the server has TLS and asks who calls, or is `insecure`.",
        lambda settings: exposure(settings, settings.host),
        ("host",),
    ),
)


class ModelServerSettings(ServerSettings):
    """What a server needs that runs a model."""

    model: Path
    """Folder of the checkpoint: config.json, safetensors and tokenizer.json, as from Hugging Face."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda or cuda:N."""
    dtype: DataTypeName = "auto"
    """Type to compute in. auto is bfloat16 on a GPU and float32 on a CPU, which few can multiply bfloat16 fast."""
    threads: int | None = Field(default=None, ge=1)
    """Threads for computation on a CPU. By default one for each core that this process may use. Where draft and
    target share a machine, give each half of the cores: they take turns, but both read the prompt at once."""
    compile: CompileMode = "auto"
    """Whether to compute with kernels that are compiled for this CPU at the first start, some seconds. auto does where
    there is a C++ compiler, and says so where there is none; on demands it; off is torch alone."""
    compile_cache: Path | None = None
    """Folder for compiled kernels. By default tandem/kernels in the user's cache folder."""
    max_length: int | None = Field(default=None, ge=1)
    """Most tokens that a sequence may hold, prompt and completion together. By default the model's own maximum."""
    max_sequences: int = Field(default=32, ge=1)
    """Most sequences that have a place in the KV cache at once; more of them wait."""
    enable_prefix_caching: bool = True
    """Whether a request takes over the keys and values of a prefix that an earlier one had. vLLM's and MAX's name."""
    enforce_eager: bool = False
    """Whether every step runs eagerly on a GPU: no CUDA graphs are captured, which spares their memory and some seconds
    at start. vLLM's name."""
    device_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory that the model and its KV cache may fill. By default 0.9 on a GPU, 0.3 on a CPU."""

    @property
    def compute_device(self) -> str:
        """Where the model runs, as torch names it."""
        return self.device

    @property
    def compute_dtype(self) -> str:
        """The type to compute in, with auto decided."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.compute_device == "cpu" else "bfloat16"


SettingsT = TypeVar("SettingsT", bound=FilledSettings)


def load_settings(cls: type[SettingsT], arguments: Sequence[str], program: str) -> SettingsT:
    """Fill a settings class from command-line arguments, then the environment, then a config file, then its defaults.

    Raises:
        ConfigurationError: naming every option that is wrong or unknown, its value and what it should be.
        SystemExit: --help was asked for (0).
    """
    prefix = cls.model_config.get("env_prefix") or ""
    try:
        layers = read_layers(cls, arguments, os.environ, program)
        settings = cls(**merged(layers))
    except ValidationError as error:
        raise ConfigurationError("; ".join(sentences(error, prefix))) from None
    settings._origins = origins(layers)
    return settings


def sentences(error: ValidationError, env_prefix: str = "") -> list[str]:
    """One sentence for each option that is wrong."""
    return [_describe(detail["loc"], detail["msg"], detail["input"], env_prefix, detail["type"])
            for detail in error.errors()]  # fmt: skip


def _describe(
    location: tuple[int | str, ...], message: str, value: object, env_prefix: str, kind: str
) -> str:
    if kind == SENTENCE:
        return message
    name = ".".join(str(part) for part in location)
    option = "--" + name.replace("_", "-")
    if kind == "missing":
        return f"{option} is missing; give it, or set {env_prefix}{name.upper()}"
    return f"{option} is {value!r}: {message[0].lower()}{message[1:]}"


def exit_with(error: Exception, code: int) -> None:
    """End the process with one sentence on stderr."""
    sys.stderr.write(f"error: {error}\n")
    sys.exit(code)

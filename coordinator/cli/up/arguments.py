"""From the options of `tandem up` to the command line of each service that it starts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cli.up.devices import DeviceOptions, ModelPlacement, http_port, place
from coordinator.cli.up.smollm2 import head_of, lossless_rule
from coordinator.settings.coordinator import DEFAULT_PORT, ConfigSettings
from tandem.config.layers import merged, read_layers
from tandem.config.methods import (
    BOUND_METHODS,
    METHODS,
    MODEL_FREE_METHODS,
    OWN_METHODS,
    canonical_method,
    checkpoint_method,
)
from tandem.errors import ConfigurationError
from tandem.model_sources.demo import demo_pair
from tandem.model_sources.extras import require_engine
from tandem.model_sources.hub import is_model_id
from tandem.model_sources.names import DEMO, NAMES

NO_DRAFT = "none"
"""In place of a draft: the target works alone."""
DRAFT_OF_A_TARGET_ALONE = "suffix"
"""Drafting method for a target without a named draft: it needs no model."""
DTYPES = ("auto", "float32", "bfloat16", "float16")

_LOOPBACK = ("--host", "127.0.0.1")
_HTTP_LOOPBACK = ("--http-host", "127.0.0.1")
_START_TIMEOUT_SECONDS = 24 * 3600
"""Bound on the coordinator's wait for the other services. `tandem up` itself notices when one ends, so fetching,
converting and loading a model may take as long as they take."""
_START_TIMEOUT_VARIABLE = "TANDEM_COORDINATOR_START_TIMEOUT_SECONDS"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `tandem up`; None where the service's own default applies."""

    target: str | None = None
    model: str | None = None
    """The target by its other name; `demo` is the bundled pair."""
    draft: str | None = None
    method: str | None = None
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    dtype: str | None = None
    threads: int | None = None
    max_length: int | None = None
    num_speculative_tokens: int | None = None
    draft_ahead: str | None = None
    chat_template: Path | None = None
    config_file: Path | None = None
    port: int = DEFAULT_PORT
    http_port: int | None = None
    http: bool = True
    log_level: str = "warning"


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """Command lines of the services; the coordinator's lacks their addresses."""

    target: list[str]
    draft: list[str] | None
    """None: the target works alone."""
    coordinator: list[str] = field(default_factory=list)

    @property
    def has_http(self) -> bool:
        """True if the coordinator answers HTTP."""
        return "--http-port" in self.coordinator


def service_arguments(options: UpOptions) -> ServiceArguments:
    """The command line of each service.

    Raises:
        ConfigurationError: an option is invalid for every service; raised before any is started.
    """
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigurationError(f"--dtype is {options.dtype!r}; it must be one of {', '.join(DTYPES)}")
    if options.chat_template is not None and not options.chat_template.is_file():
        raise ConfigurationError(f"--chat-template is {options.chat_template}; there is no such file")
    in_file = _in_file(options.config_file)
    target_place, draft_place = place(
        options.devices, has_draft_model=_has_draft_model(options, in_file), in_file=in_file
    )
    base = _words(log_level=options.log_level)
    target = _target(options)
    head, own = _head(options, in_file), _own_method(options)
    draft = None if head or own else _draft(options, in_file, _draft_words(options, draft_place), base)
    is_head_unasked = head is not None and options.draft is None and options.method is None
    rule = lossless_rule(in_file) if is_head_unasked else None
    require_engine()
    return ServiceArguments(
        # This command serves this machine alone, whatever the environment says.
        target=[
            *(*_LOOPBACK, "--port", "0", "--model", target),
            *_words(device=target_place.device),
            *_model_words(options, target_place),
            *_words(draft_model=head, method=own),
            *base,
        ],
        draft=draft,
        coordinator=[*_LOOPBACK, *_HTTP_LOOPBACK, *_coordinator_words(options, rule), *base],
    )


def _coordinator_words(options: UpOptions, rule: str | None) -> list[str]:
    return _words(
        port=options.port,
        http_port=http_port(options.http_port) if options.http else None,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_ahead=options.draft_ahead,
        rejection_sampling_strategy=rule,
        chat_template=options.chat_template,
        config_file=options.config_file,
        start_timeout_seconds=None if _START_TIMEOUT_VARIABLE in os.environ else _START_TIMEOUT_SECONDS,
    )


def next_command(address: str) -> str:
    """A command that completes a prompt over the coordinator at that address, as it can be typed here."""
    called = Path(sys.argv[0])
    is_on_path = shutil.which("tandem") == str(called.absolute())
    program = "tandem" if is_on_path or called.name != "tandem" else str(called)
    where = [] if address == f"127.0.0.1:{DEFAULT_PORT}" else ["--address", address]
    return shlex.join([program, "generate", "def main():", "--max-tokens", "64", *where])


def _target(options: UpOptions) -> str:
    """The target for its service's command line."""
    if options.model is not None and options.target is not None:
        raise ConfigurationError(
            f"--model is {options.model} and --target is {options.target}, which both name the target; give one of them"
        )
    if _serves_demo(options):
        return str(demo_pair().target)
    if options.model is not None:
        return _checked("--model", options.model)
    return _checked("--target", str(options.target))


def _serves_demo(options: UpOptions) -> bool:
    return options.target is None and options.model in (None, DEMO)


def _model_words(options: UpOptions, placement: ModelPlacement) -> list[str]:
    """Options of a service with a model, all but its device."""
    # Draft and target take turns, but the waiting threads of one would still spin on the other's cores.
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // 2)
    return _words(
        dtype=options.dtype,
        threads=threads,
        max_length=options.max_length,
        device_memory_utilization=placement.memory_utilization,
    )


def _draft_words(options: UpOptions, placement: ModelPlacement) -> list[str]:
    # `draft_devices` is stronger than `device`, and may be set in the config file or the environment.
    is_named = options.devices.draft_device is not None
    name = "draft_devices" if is_named else "device"
    return [*_words(**{name: placement.device}), *_model_words(options, placement)]


def _head(options: UpOptions, in_file: Mapping[str, Any]) -> str | None:
    """Folder of a drafting head, which the target's process hosts; None for any other draft.

    Raises:
        ConfigurationError: the method has no head, or there is no such folder.
    """
    method = None if options.method is None else canonical_method(options.method)
    if method is not None and method not in METHODS:
        raise ConfigurationError(f"--method is {options.method}; it must be one of {', '.join(METHODS)}")
    if method in OWN_METHODS:
        return None
    if method in BOUND_METHODS and options.draft is None and _serves_demo(options):
        return str(demo_pair().head(str(method)))
    if options.draft is None:
        named = options.model or options.target
        bundled = head_of(named, method, is_draft_in_file=_is_drafting_in(in_file))
        if bundled is not None:
            return str(bundled)
    folder = Path(options.draft).expanduser() if options.draft else None
    if folder is None or (method or checkpoint_method(folder)) not in BOUND_METHODS:
        if method in BOUND_METHODS:
            raise ConfigurationError(f"--method is {method}; name the folder of such a head with --draft")
        return None
    return _checked("--draft", str(folder))


def _own_method(options: UpOptions) -> str | None:
    """The method whose weights lie in the target's own checkpoint; None for any other.

    Raises:
        ConfigurationError: a draft is named as well.
    """
    method = canonical_method(options.method or "")
    if method not in OWN_METHODS:
        return None
    if options.draft is not None:
        raise ConfigurationError(
            f"--method is {method}, whose weights lie in the target's own checkpoint, and --draft is {options.draft}; "
            "leave out --draft"
        )
    return method


def _has_draft_model(options: UpOptions, in_file: Mapping[str, Any]) -> bool:
    if _head(options, in_file) is not None or _own_method(options) is not None:
        return False
    if options.draft is None and _is_drafting_in(in_file):
        return in_file.get("speculative_method") not in MODEL_FREE_METHODS
    return _draft_name(options) not in (*MODEL_FREE_METHODS, NO_DRAFT)


def _is_drafting_in(in_file: Mapping[str, Any]) -> bool:
    return "speculative_method" in in_file or "draft_model_path" in in_file


def _draft_name(options: UpOptions) -> str:
    if options.draft is not None:
        return options.draft
    if options.method is not None and canonical_method(options.method) in MODEL_FREE_METHODS:
        return canonical_method(options.method)
    return str(demo_pair().draft) if _serves_demo(options) else DRAFT_OF_A_TARGET_ALONE


def _draft(
    options: UpOptions, in_file: Mapping[str, Any], model: list[str], base: list[str]
) -> list[str] | None:
    shared = [*_LOOPBACK, "--port", "0", *_words(config_file=options.config_file)]
    if options.draft is None and _is_drafting_in(in_file):
        return [*shared, *(model if _has_draft_model(options, in_file) else []), *base]
    named = _draft_name(options)
    if named == NO_DRAFT:
        return None
    if named in MODEL_FREE_METHODS:
        return [*shared, "--method", named, *base]
    return [*shared, "--model", _checked("--draft", named), *model, *base]


def _in_file(path: Path | None) -> Mapping[str, Any]:
    """Options of speculative decoding in a config file.

    Raises:
        ConfigurationError: it cannot be read.
    """
    if path is None:
        return {}
    return merged(read_layers(ConfigSettings, ["--config-file", str(path)], {}, "tandem up"))


def _checked(option: str, reference: str) -> str:
    """A model as it was named, unless it can be neither a folder nor a name of one elsewhere.

    Raises:
        ConfigurationError: it is a path, and no folder is there.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return str(path)
    may_be_elsewhere = reference in NAMES or is_model_id(reference)
    if path.exists():
        raise ConfigurationError(f"{option} is {reference}; a file is there, and it must be a model's folder")
    if not may_be_elsewhere:
        others = f", or {', '.join((*MODEL_FREE_METHODS, NO_DRAFT))}" if option == "--draft" else ""
        raise ConfigurationError(
            f"{option} is {reference}; there is no such folder: name a model's folder or a Hugging Face id{others}"
        )
    return reference


def _words(**values: object) -> list[str]:
    """Command-line options with a value."""
    return [
        word
        for name, value in values.items()
        if value is not None
        for word in ("--" + name.replace("_", "-"), str(value))
    ]

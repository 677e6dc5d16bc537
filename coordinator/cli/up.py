"""`tandem up`: a draft service, a target service and a coordinator on this machine."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.command import errors_to_exit
from coordinator.cli.serve import package_of
from coordinator.settings.coordinator import DEFAULT_PORT, ConfigSettings
from tandem.config.layers import merged, read_layers
from tandem.config.names import (
    BOUND_METHODS,
    DEVICES,
    METHODS,
    MODEL_FREE_METHODS,
    OWN_METHODS,
    as_torch,
    canonical_method,
    checkpoint_method,
)
from tandem.errors import ConfigurationError, ServiceUnavailableError, TandemError
from tandem.model_sources.demo import demo_pair, smollm2_head
from tandem.model_sources.extras import require_engine
from tandem.model_sources.hub import is_model_id
from tandem.model_sources.names import DEMO, NAMES, SMOLLM2
from tandem.serving.server import announce, stop_signals
from tandem.settings import exit_with

SMOLLM2_METHOD = "eagle3"
"""Drafting method where none is named."""
_RULE = "residual"
_RULE_VARIABLES = (
    "TANDEM_COORDINATOR_REJECTION_SAMPLING_STRATEGY",
    "TANDEM_COORDINATOR_REJECTION_SAMPLE_METHOD",
)
_RULE_OPTIONS = ("rejection_sampling_strategy", "synthetic_acceptance_rate")


def head_of(target: str | None, method: str | None, *, is_draft_in_file: bool) -> Path | None:
    """Folder of the head for a target without a named draft; None for another target or another way to draft.

    Args:
        target: As it was named.
        method: The method that was named, by its canonical name.
        is_draft_in_file: A config file names the draft.
    """
    if target != SMOLLM2 or Path(SMOLLM2).is_dir():
        return None
    if method is None:
        return None if is_draft_in_file else smollm2_head(SMOLLM2_METHOD)
    return smollm2_head(method) if method in BOUND_METHODS else None


def lossless_rule(in_file: Mapping[str, Any]) -> str | None:
    """The acceptance rule where nobody asked for a head, whose own default is lossy; None where one is named."""
    is_named = any(name in in_file for name in _RULE_OPTIONS) or any(
        name in os.environ for name in _RULE_VARIABLES
    )
    return None if is_named else _RULE


TARGET_SHARE = 0.65
DRAFT_SHARE = 0.25
"""Default shares where both models are on one accelerator. The rest is for CUDA itself and for steps."""

HTTP_PORT = 8000
"""Default HTTP port, used unless it is taken."""

_UTILIZATION = "DEVICE_MEMORY_UTILIZATION"


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """Where one model runs."""

    device: str
    """As torch names it."""
    memory_utilization: float | None
    """Share of the device's memory; None where the service's own default or its environment decides."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of `tandem up` about devices."""

    device: str = "cpu"
    """For both models, unless one has its own."""
    target_device: str | None = None
    draft_device: str | None = None
    target_memory_utilization: float | None = None
    draft_memory_utilization: float | None = None


def place(
    options: DeviceOptions, *, has_draft_model: bool, in_file: Mapping[str, object]
) -> tuple[ModelPlacement, ModelPlacement]:
    """Where the target and the draft run.

    Args:
        options: what was asked for.
        has_draft_model: false for drafting without a model, which needs no device.
        in_file: options of the config file that the draft service reads.

    Raises:
        ConfigurationError: a device or a share is none, or the shares are more than one device.
    """
    device = _device("--device", options.device)
    target = _device("--target-device", options.target_device) or device
    named = _device("--draft-device", options.draft_device)
    draft = named or _device("draft_devices", in_file.get("draft_devices")) or device
    shares = {"target": options.target_memory_utilization, "draft": options.draft_memory_utilization}
    for name, share in shares.items():
        if share is not None and not 0 < share <= 1:
            raise ConfigurationError(
                f"--{name}-memory-utilization is {share:g}; it must be above 0 and at most 1"
            )
    if has_draft_model and _is_one_accelerator(target, draft):
        _divide(shares, target, in_file)
    return ModelPlacement(target, shares["target"]), ModelPlacement(draft, shares["draft"])


def _device(option: str, name: object) -> str:
    """The device as torch names it; empty where none is named."""
    if name is None:
        return ""
    try:
        return as_torch(str(name))
    except ValueError as error:
        raise ConfigurationError(f"{option} is {str(name)!r}: {error}") from None


def _is_one_accelerator(target: str, draft: str) -> bool:
    first, second = (f"{name}:0" if name == "cuda" else name for name in (target, draft))
    return first == second != "cpu"


def _divide(shares: dict[str, float | None], device: str, in_file: Mapping[str, object]) -> None:
    """Gives each model a share, unless it has one from elsewhere."""
    defaults = {"target": TARGET_SHARE, "draft": DRAFT_SHARE}
    for name, default in defaults.items():
        is_set = any(os.environ.get(f"TANDEM_{prefix}{_UTILIZATION}") for prefix in (f"{name.upper()}_", ""))
        is_in_file = name == "draft" and "device_memory_utilization" in in_file
        if shares[name] is None and not is_set and not is_in_file:
            shares[name] = default
    if (total := sum(share for share in shares.values() if share is not None)) > 1:
        raise ConfigurationError(
            f"--target-memory-utilization is {shares['target']:g} and --draft-memory-utilization is "
            f"{shares['draft']:g}, {total:g} of {device} together; it must be at most 1"
        )


def http_port(wanted: int | None) -> int:
    """The port for HTTP: the wanted one, or the usual one if it is free, or 0 for any."""
    if wanted is not None:
        return wanted
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", HTTP_PORT))
        except OSError:
            return 0  # any free one
    return HTTP_PORT


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


# Seconds for a child to stop before it is killed. Its drain takes up to 30 s of them by default.
_STOP_SECONDS = 40.0


def up(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="demo|smollm2|DIR|ID",
            help="Model to serve: the bundled pair, SmolLM2-135M-Instruct, a folder or a Hugging Face id. "
            "[default: demo]",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="smollm2|DIR|ID", help="Another name for --model.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|suffix|none|DIR|ID",
            help="Draft: ngram or suffix need no model, none leaves the target alone, a folder or id is a model with "
            "the target's tokenizer, or a drafting head for it. [default: the demo pair's; for smollm2 its head; for "
            "another model, suffix]",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Drafting method. eagle, eagle3, medusa: a head beside the target. [default: by the draft's name]"
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum tokens proposed per verification. [default: the coordinator's]"),
    ] = None,
    draft_ahead: Annotated[
        str | None,
        typer.Option(
            metavar="auto|off|NUMBER",
            help="Outcomes of each verification to draft ahead for. [default: the coordinator's, auto]",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=f"Where both models run: {DEVICES}.")] = "cpu",
    target_device: Annotated[
        str | None, typer.Option(help="Where the target runs. [default: that of --device]")
    ] = None,
    draft_device: Annotated[
        str | None,
        typer.Option(
            "--draft-device", "--draft-devices", help="Where the draft runs. [default: that of --device]"
        ),
    ] = None,
    target_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of its device's memory that the target takes. "
            f"[default: the service's, or {TARGET_SHARE:g} beside the draft on one GPU]"
        ),
    ] = None,
    draft_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of its device's memory that the draft takes. "
            f"[default: the service's, or {DRAFT_SHARE:g} beside the target on one GPU]"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}. [default: each service's]")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each model. [default: half of the cores]")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Maximum tokens of a sequence. [default: the models']")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file for chats. [default: the model's own]")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="TOML, YAML or JSON file for coordinator and draft.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the coordinator; 0 takes any free one.")] = DEFAULT_PORT,
    http_port: Annotated[
        int | None,
        typer.Option(
            help=f"Port for HTTP: OpenAI's API and a page; 0 takes any free one. "
            f"[default: {HTTP_PORT}, or a free one where it is taken]"
        ),
    ] = None,
    http: Annotated[bool, typer.Option(help="Serve HTTP.")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Start a draft service, a target service and a coordinator here; stop them all with Ctrl-C.

    A service's other options are read from its environment: TANDEM_TARGET_..., TANDEM_DRAFT_..., TANDEM_COORDINATOR_...
    """
    options = UpOptions(
        target=target,
        model=model,
        draft=draft,
        method=method,
        devices=DeviceOptions(
            device, target_device, draft_device, target_memory_utilization, draft_memory_utilization
        ),
        dtype=dtype,
        threads=threads,
        max_length=max_length,
        num_speculative_tokens=num_speculative_tokens,
        draft_ahead=draft_ahead,
        chat_template=chat_template,
        config_file=config_file,
        port=port,
        http_port=http_port,
        http=http,
        log_level=log_level,
    )
    with errors_to_exit():
        arguments = service_arguments(options)
    try:
        asyncio.run(_Cluster(arguments).run())
    except TandemError as error:
        exit_with(error, 1)


class _Cluster:
    def __init__(self, arguments: ServiceArguments) -> None:
        self._arguments = arguments
        self._children: list[_Child] = []

    async def run(self) -> None:
        """Run until a signal, or until a child ends.

        Raises:
            ServiceUnavailableError: a child ended.
        """
        with stop_signals(before_end=self._kill) as stopping:
            work = asyncio.create_task(self._serve())
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if work.done():
                work.result()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _kill(self) -> None:
        """End the children at once."""
        for child in self._children:
            child.kill()

    async def _ready(self, coordinator: _Child) -> list[str]:
        """The lines to end the start with, once the coordinator answers: its address, the page, the next command."""
        # In the order of its output.
        url = await coordinator.line("http on ") if self._arguments.has_http else None
        address = await coordinator.line("ready on ")
        page = [] if url is None else [f"page on {url}/ (OpenAI's API under {url}/v1)"]
        return [f"ready on {address}", *page, f"next, in another terminal: {next_command(address)}"]

    async def _serve(self) -> None:
        # The stack ends the coordinator first: it drains while the models still answer it.
        async with AsyncExitStack() as stack:
            models = {"target": self._arguments.target, "draft": self._arguments.draft}
            started = {
                name: await stack.enter_async_context(self._child(name, arguments))
                for name, arguments in models.items()
                if arguments is not None
            }
            addresses = [
                word
                for name, child in started.items()
                for word in (f"--{name}-address", await child.line("listening on "))
            ]
            coordinator = await stack.enter_async_context(
                self._child("coordinator", [*self._arguments.coordinator, *addresses])
            )
            ends = [asyncio.create_task(child.end()) for child in self._children]
            ready = asyncio.create_task(self._ready(coordinator))
            stack.callback(ready.cancel)  # first, or it would see the coordinator's end
            await asyncio.wait({*ends, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                for line in ready.result():
                    announce(f"tandem up: {line}")
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            ended = next(
                child
                for child, end in zip(self._children, ends, strict=True)
                if end.done() or child is coordinator
            )
            for end in ends:
                end.cancel()
            raise ServiceUnavailableError(f"{await ended.obituary()}; the other services were stopped")

    @asynccontextmanager
    async def _child(self, name: str, arguments: Sequence[str]) -> AsyncIterator[_Child]:
        child = await _started(name, arguments)
        self._children.append(child)
        try:
            yield child
        finally:
            await asyncio.shield(child.stop())


class _Child:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    async def line(self, mark: str) -> str:
        """Text after the mark in the first line of stdout that has it.

        Raises:
            ServiceUnavailableError: it ended without such a line.
        """
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            _, found, rest = line.decode().partition(mark)
            if found:
                return rest.strip()
        raise ServiceUnavailableError(await self.obituary())

    async def end(self) -> None:
        """Return when the process has ended."""
        await self.process.wait()

    async def obituary(self) -> str:
        """How it ended, in words."""
        code = await self.process.wait()
        if code < 0:
            return f"the {self.name} service was ended by signal {-code}"
        return f"the {self.name} service ended with exit code {code}"

    def kill(self) -> None:
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()

    async def stop(self) -> None:
        """Ask it to stop, and kill it when it does not."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


async def _started(name: str, arguments: Sequence[str]) -> _Child:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # otherwise Python would import files from the working directory
        *("-m", "tandem.serving.supervised", str(os.getpid()), str(package_of(name, arguments))),
        *arguments,
        # Never written to: when this process ends, the pipe closes, which the child notices.
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A session of its own: Ctrl-C reaches only this process, which then stops the children in order.
        start_new_session=True,
    )
    return _Child(name, process)

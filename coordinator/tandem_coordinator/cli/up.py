"""`tandem up`: a draft service, a target service and a coordinator on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import typer
from pydantic import AfterValidator, Field, FilePath

from tandem.config import names
from tandem.config.options import ALIASES
from tandem.config.settings import ModelServerSettings
from tandem.config.sources import Environment
from tandem.config.speculative import MAX_CONFIGURED_TOKENS, checked_method
from tandem.errors import ConfigurationError, ServiceUnavailableError, TandemError
from tandem.model_sources import bundled
from tandem.model_sources.hub import fetch_config, is_model_id
from tandem.rpc.addresses import UNIX
from tandem.serving.children import Child
from tandem.serving.protection import MIN_TOKEN_LENGTH
from tandem.serving.server import MAX_SOCKET_PATH_BYTES, CancelledByEventError, announce, stop_signals, unless
from tandem.serving.standard_streams import exit_with, write_error
from tandem.telemetry.logs import LogLevel
from tandem.telemetry.progress import Progress
from tandem_coordinator.cli.command import VerbOptions, command
from tandem_coordinator.cli.main import app
from tandem_coordinator.cli.serve import SERVICES
from tandem_coordinator.settings.coordinator import DEFAULT_PORT, CallParser, ConfigSettings, ReasoningParser
from tandem_coordinator.settings.sampling import VLLM

SMOLLM2_METHOD = "eagle3"
"""Drafting method for smollm2 where none is named: Tandem comes with such a head for it."""
NO_DRAFT = "none"
"""In place of a draft: the target works alone."""
SHARES = {"target": 0.65, "draft": 0.25}
"""Default shares where both models are on one accelerator. The rest is for CUDA itself and for steps."""
HTTP_PORT = 8000
"""Default HTTP port, used unless it is taken."""

_DEFAULTS = {
    bundled.SMOLLM2: f"the model is {bundled.SMOLLM2_NAME}; --model names another",
    bundled.DEMO: "the model is the bundled pair, which continues Python code; for one that chats: "
    + bundled.SMOLLM2_COMMANDS,
}
"""The sentence for each default of --model."""

STOP_SECONDS = 40.0
"""For a child to stop before it is killed. Its drain takes up to 30 s of them by default."""


Share = Annotated[float | None, Field(gt=0, le=1)]
"""Share of a device's memory."""


class UpOptions(VerbOptions):
    """Options of `tandem up`; None where the service's own default applies."""

    model: Annotated[str | None, typer.Option(metavar="smollm2|demo|DIR|ID")] = Field(
        default=None,
        description=f"Model to serve: {bundled.SMOLLM2_NAME}, the bundled pair, a folder or a Hugging Face id. "
        "[default: smollm2, or demo where its packages are missing]",
    )
    target: Annotated[str | None, typer.Option(metavar="smollm2|DIR|ID")] = None
    """Another name for --model."""
    draft: Annotated[str | None, typer.Option(metavar="ngram|suffix|none|DIR|ID")] = None
    """Draft: ngram or suffix need no model, none leaves the target alone, a folder or id is a model, best with the
    target's tokenizer, or a drafting head for it. [default: the demo pair's; for smollm2 its head, with vllm suffix;
    for another model, suffix]"""
    method: Annotated[str, AfterValidator(checked_method)] | None = None
    """Drafting method. eagle, eagle3, medusa: a head beside the target. [default: by the draft's name]"""
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_CONFIGURED_TOKENS)
    """Maximum tokens proposed per verification. [default: the coordinator's]"""
    draft_ahead: Annotated[str | None, typer.Option(metavar="auto|off|NUMBER")] = None
    """Outcomes of each verification to draft ahead for. [default: the coordinator's, auto]"""
    device: names.Device = Field(default="cpu", description=f"Where both models run: {names.DEVICES}.")
    target_device: names.Device | None = None
    """Where the target runs. [default: that of --device]"""
    draft_device: Annotated[names.Device | None, typer.Option("--draft-device", "--draft-devices")] = None
    """Where the draft runs. [default: that of --device]"""
    target_memory_utilization: Share = Field(
        default=None,
        description="Share of its device's memory that the target takes. "
        f"[default: the service's, or {SHARES['target']:g} beside the draft on one GPU]",
    )
    draft_memory_utilization: Share = Field(
        default=None,
        description="Share of its device's memory that the draft takes. "
        f"[default: the service's, or {SHARES['draft']:g} beside the target on one GPU]",
    )
    engine: Literal["auto", "tandem", "vllm"] | None = None
    """Engine that runs the models. [default: each service's, auto]"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Type of the weights. [default: each service's]"""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each model. [default: all cores, or half of them for each of two models on the CPU]"""
    max_length: Annotated[int | None, typer.Option("--max-length", "--max-model-len")] = Field(
        default=None, ge=1
    )
    """Maximum tokens of a sequence. [default: the models', the smaller of two]"""
    chat_template: FilePath | None = None
    """Jinja file for chats. [default: the model's own]"""
    tool_call_parser: Annotated[CallParser | None, typer.Option(metavar="auto|none|NAME")] = None
    """Form in which the model writes calls of tools, by vLLM's name. [default: the coordinator's, auto]"""
    reasoning_parser: Annotated[ReasoningParser | None, typer.Option(metavar="auto|none|NAME")] = None
    """Form in which the model writes reasoning, by vLLM's name. [default: the coordinator's, auto]"""
    generation_config: Annotated[str | None, typer.Option(metavar="auto|vllm|DIR")] = None
    """Sampling parameters that hold where a request names none: auto, the model's own; vllm, none; or those of a
    folder. [default: the coordinator's, auto]"""
    override_generation_config: Annotated[str | None, typer.Option(metavar="JSON")] = Field(
        default=None,
        description="Sampling parameters in place of those, as a JSON object. [default: for smollm2 those of its card, "
        f"{json.dumps(bundled.SMOLLM2_SAMPLING)}]",
    )
    served_model_name: str | None = None
    """Name of the model in OpenAI's API, or several with commas between them. [default: that of the target's folder]"""
    host: str | None = None
    """Address that the coordinator listens on. [default: its own, 127.0.0.1]"""
    api_key: str | None = Field(
        default=None,
        description=f"Token that callers must have, of {MIN_TOKEN_LENGTH} characters or more; "
        "TANDEM_COORDINATOR_AUTH_TOKEN keeps it out of the command line.",
    )
    insecure: bool = False
    """Let other machines in without TLS, or without a token, where everyone in the network is trusted."""
    config_file: Path | None = None
    """TOML, YAML or JSON file for coordinator and draft."""
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port of the coordinator; 0 takes any free one."""
    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for HTTP: OpenAI's API and a page; 0 takes any free one. "
        f"[default: {HTTP_PORT}, or a free one where it is taken]",
    )
    http: bool = True
    """Serve HTTP."""
    log_level: LogLevel = "warning"
    """Lowest severity of log lines."""


@command(app)
def up(options: UpOptions) -> None:
    """Start a draft service, a target service and a coordinator here; stop them all with Ctrl-C.

    A service's other options are read from its environment: TANDEM_TARGET_..., TANDEM_DRAFT_..., TANDEM_COORDINATOR_...
    """
    arguments = service_arguments(options)
    if options.model is None and options.target is None:
        announce(f"tandem up: {_DEFAULTS[arguments.model]}")
    if _has_card_sampling(arguments, options):
        announce(
            f"tandem up: {card_sampling(bundled.SMOLLM2_SAMPLING)}; --generation-config {VLLM} turns this off"
        )
    for sentence in not_read(arguments, os.environ):
        write_error(f"tandem up: {sentence}\n")
    if options.api_key is not None:
        os.environ["TANDEM_COORDINATOR_AUTH_TOKEN"] = options.api_key
    lengths = unequal_lengths(arguments, os.environ)
    if lengths:
        target, draft = lengths
        announce(
            f"tandem up: the target was made for {target} tokens and the draft for {draft}; both are started with "
            f"--max-length {min(lengths)}"
        )
        arguments = arguments.with_options(max_length=min(lengths))
    with private_folder() as folder:
        try:
            asyncio.run(_Cluster(arguments, folder).run())
        except TandemError as error:
            exit_with(error, 1)


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for the services' sockets that no other user can enter: they are reached by nobody else, and have no
    port."""
    try:
        folder = TemporaryDirectory(prefix="tandem-")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"no folder can be made for the services' sockets: {reason}; set TMPDIR to one that can be written"
        ) from error
    with folder as name:
        longest = socket_of(Path(name), "target").removeprefix(UNIX)
        if (size := len(os.fsencode(longest))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                f"the path of a service's socket, {longest}, has {size} bytes; it must have at most "
                f"{MAX_SOCKET_PATH_BYTES}: set TMPDIR to a folder with a shorter path"
            )
        yield Path(name)


def socket_of(folder: Path, service: str) -> str:
    """Address of a service's socket."""
    return f"{UNIX}{folder / service}"


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """Command lines of the services; the coordinator's lacks their addresses."""

    target: list[str]
    draft: list[str] | None
    """None: the target works alone, or hosts its draft."""
    coordinator: list[str]
    model: str
    """The model as it was named, or the default."""
    references: tuple[str, ...]
    """The target's model, and that of a draft service which has one."""

    def with_options(self, **values: object) -> ServiceArguments:
        """These with further options of both models."""
        words = as_words(**values)
        draft = None if self.draft is None else [*self.draft, *words]
        return replace(self, target=[*self.target, *words], draft=draft)


class _Drafting(NamedTuple):
    """A way to draft: a service's, the target's own, or neither."""

    service: Mapping[str, str] | None = None
    """Options of a draft service; without any, the config file's."""
    has_model: bool = False
    """True if that service has a model."""
    beside: Mapping[str, str] = {}
    """Options of a target that drafts itself: with a head, or with its own layers."""


def service_arguments(options: UpOptions) -> ServiceArguments:
    """The command line of each service."""
    file = as_words(config_file=options.config_file)
    shared, _ = ConfigSettings.read(file, os.environ, "tandem up")
    options = _with_model(options, shared)
    target = str(bundled.demo_pair().target)
    if options.model != bundled.DEMO:
        target = _check_model("--model" if options.target is None else "--target", str(options.model))
    draft = _draft(options, shared)
    devices = _devices(options, shared)
    shares = _shares(options, shared, devices if draft.has_model else {})
    bundled.require_engine()
    # Else auto, the fastest lossless rule. A coordinator's own default is MAX's: lossy with a head.
    names_rule = not {"rejection_sampling_strategy", "synthetic_acceptance_rate"}.isdisjoint(shared)
    # Else the draft proposes, and the target verifies with the penalties. A coordinator's own default is cautious.
    names_penalties = not {"draft_model_penalties", "compatibility"}.isdisjoint(shared)
    service: dict[str, Any] = {"log_level": options.log_level}
    threads = options.threads
    if threads is None and draft.has_model and devices["target"] == devices["draft"] == "cpu":
        # They take turns, but the waiting threads of one would still spin on the other's cores.
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
    model: dict[str, Any] = {
        "engine": options.engine,
        "dtype": options.dtype,
        "threads": threads,
        "max_length": shared.get("max_length") if options.max_length is None else options.max_length,
    }
    drafting: dict[str, Any] | None = None
    draft_model = (draft.service or {}).get("model", shared.get("draft_model_path"))
    if draft.service is not None:
        drafting = service | {"config_file": options.config_file, **draft.service}
        if draft.has_model:
            # `draft_devices` is stronger than `device`, and may be set in the config file or the environment.
            name = "device" if options.draft_device is None else "draft_devices"
            drafting |= model | {name: devices["draft"], "device_memory_utilization": shares["draft"]}
    on_target = {
        "model": target,
        "device": devices["target"],
        "device_memory_utilization": shares["target"],
        # vLLM captures graphs for proposals of as many tokens as the coordinator asks for.
        "num_speculative_tokens": options.num_speculative_tokens or shared.get("num_speculative_tokens"),
    }
    return ServiceArguments(
        target=as_words(**service, **model, **on_target, **draft.beside),
        draft=None if drafting is None else as_words(**drafting),
        coordinator=[
            *(["--insecure"] if options.insecure else []),
            *as_words(
                host=options.host,
                http_host=options.host,
                served_model_name=options.served_model_name,
                port=options.port,
                http_port=_http_port(options.http_port) if options.http else None,
                num_speculative_tokens=options.num_speculative_tokens,
                draft_ahead=options.draft_ahead,
                rejection_sampling_strategy=None if names_rule or draft == _Drafting() else names.AUTO,
                draft_model_penalties=None if names_penalties or draft == _Drafting() else "draft",
                chat_template=options.chat_template,
                tool_call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
                generation_config=options.generation_config,
                override_generation_config=_sampling(options, shared),
                config_file=options.config_file,
                # This command itself notices when a service ends, so a model may load for as long as it takes.
                start_timeout_seconds=None if "start_timeout_seconds" in shared else 24 * 3600,
                log_level=options.log_level,
            ),
        ],
        model=str(options.model),
        references=(target, *([str(draft_model)] if draft.has_model and draft_model else [])),
    )


def _sampling(options: UpOptions, shared: Mapping[str, Any]) -> str | None:
    """The override of sampling parameters: for smollm2 those of its card, unless somebody names any."""
    is_named = not {"generation_config", "override_generation_config"}.isdisjoint(shared)
    is_smollm2 = options.model == bundled.SMOLLM2 and not Path(bundled.SMOLLM2).is_dir()
    if options.override_generation_config is not None or options.generation_config is not None or is_named:
        return options.override_generation_config
    return json.dumps(bundled.SMOLLM2_SAMPLING) if is_smollm2 else None


def _has_card_sampling(arguments: ServiceArguments, options: UpOptions) -> bool:
    """True if the sampling parameters are those of the model's card."""
    return (
        options.override_generation_config is None and "--override-generation-config" in arguments.coordinator
    )


def card_sampling(sampling: Mapping[str, float]) -> str:
    """The sentence that names the sampling parameters of a model's card."""
    named = " and ".join(f"{name} {value:g}" for name, value in sampling.items())
    return f"requests are sampled at {named} unless they say otherwise, as the model's card advises"


def unequal_lengths(arguments: ServiceArguments, environment: Mapping[str, str]) -> tuple[int, ...]:
    """The lengths that target and draft were made for, where nobody named one and they are known to differ."""
    is_named = any("max_length" in _variables_of(each, environment) for each in _SERVICES.values())
    if is_named or "--max-length" in arguments.target or len(arguments.references) < 2:
        return ()
    lengths = tuple(map(_length, arguments.references))
    return () if 0 in lengths or len({*lengths}) == 1 else lengths


class _Target(ModelServerSettings):
    """Options of a target service that a draft service has as well."""

    env_prefix: ClassVar = "TANDEM_TARGET_"


class _Draft(ModelServerSettings):
    """The same of a draft service."""

    env_prefix: ClassVar = "TANDEM_DRAFT_"


_SERVICES = {"target": _Target, "draft": _Draft}


def _variables_of(service: type[ModelServerSettings], environment: Mapping[str, str]) -> Mapping[str, Any]:
    """The options that the environment sets for a service."""
    return Environment(service, environment)()


def _length(reference: str) -> int:
    """Maximum tokens of a model's sequences, by its config.json; 0 where that does not say it."""
    folder = bundled.smollm2_folder() if reference == bundled.SMOLLM2 else Path(reference)
    if not folder.is_dir() and is_model_id(reference):
        folder = fetch_config(reference)
    config = names.read_config(folder)
    text_config = config.get("text_config")
    for part in (text_config if isinstance(text_config, dict) else {}, config):
        for key in names.LENGTH_KEYS:
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _with_model(options: UpOptions, shared: Mapping[str, Any]) -> UpOptions:
    """The options with a model: by default one that chats, but the bundled target for a draft that it may not fit."""
    if options.model is not None and options.target is not None:
        raise ConfigurationError(
            f"--model is {options.model} and --target is {options.target}, which both name the target; give one of them"
        )
    if (named := options.model or options.target) is not None:
        return options.model_copy(update={"model": named})
    method = names.canonical_method(options.method or str(shared.get("speculative_method", "")))
    has_head = method not in names.BOUND_METHODS or bundled.smollm2_head(method) is not None
    without_model = (None, NO_DRAFT, *names.MODEL_FREE_METHODS)
    is_any_draft = options.draft in without_model and "draft_model_path" not in shared
    is_here = not bundled.smollm2_missing() and not Path(bundled.SMOLLM2).exists()
    is_smollm2 = has_head and is_any_draft and is_here
    return options.model_copy(update={"model": bundled.SMOLLM2 if is_smollm2 else bundled.DEMO})


def not_read(arguments: ServiceArguments, environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that would set an option of a service, and does not."""
    sockets = ["--host", "--port"]
    for service, words in (
        ("target", [*arguments.target, *sockets]),
        ("draft", None if arguments.draft is None else [*arguments.draft, *sockets]),
        ("coordinator", [*arguments.coordinator, "--target-address", "--draft-address"]),
    ):
        prefix = f"TANDEM_{service.upper()}_"
        for variable in (each for each, value in environment.items() if value and each.startswith(prefix)):
            name = variable.removeprefix(prefix).lower()
            flags = [_flag(each) for each in (name, ALIASES.get(name, name))]
            if words is None:
                yield f"{variable} is not read: there is no draft service"
            elif not set(flags).isdisjoint(words):
                yield f"{variable} is not read: tandem up decides {flags[0]} of the {service} itself"


def _draft(options: UpOptions, shared: Mapping[str, Any]) -> _Drafting:
    method = options.method
    checkpoint = options.draft
    shared_method = names.canonical_method(str(shared.get("speculative_method", "")))
    if method is None and checkpoint is None and shared_method in names.BOUND_METHODS:
        # The target hosts such a draft, so that no draft service has a use for the method.
        method = shared_method
        checkpoint = shared.get("draft_model_path")
    if method in names.OWN_METHODS:
        if options.draft is not None:
            raise ConfigurationError(
                f"--method is {method}, whose weights lie in the target's own checkpoint, and --draft is "
                f"{options.draft}; leave out --draft"
            )
        return _Drafting(beside={"method": str(method)})
    if checkpoint is None:
        return _unnamed_draft(options, method, shared)
    if (method or names.checkpoint_method(Path(checkpoint).expanduser())) in names.BOUND_METHODS:
        return _Drafting(beside={"draft_model": _check_model("--draft", str(Path(checkpoint).expanduser()))})
    if checkpoint == NO_DRAFT:
        return _Drafting()
    if checkpoint in names.MODEL_FREE_METHODS:
        return _Drafting({"method": checkpoint})
    return _Drafting({"model": _check_model("--draft", checkpoint)}, has_model=True)


def _unnamed_draft(options: UpOptions, method: str | None, shared: Mapping[str, Any]) -> _Drafting:
    is_in_file = "speculative_method" in shared or "draft_model_path" in shared
    is_bound = method in names.BOUND_METHODS
    if is_bound and options.model == bundled.DEMO:
        return _Drafting(beside={"draft_model": str(bundled.demo_pair().head(str(method)))})
    is_smollm2 = options.model == bundled.SMOLLM2 and not Path(bundled.SMOLLM2).is_dir()
    # vLLM shows a head nothing of its target
    is_free = method is None and not is_in_file and options.engine != "vllm"
    may_bring_head = is_smollm2 and (is_bound or is_free)
    if may_bring_head and (head := bundled.smollm2_head(method or SMOLLM2_METHOD)):
        return _Drafting(beside={"draft_model": str(head)})
    if is_bound:
        raise ConfigurationError(f"--method is {method}; name the folder of such a head with --draft")
    if is_in_file:
        return _Drafting({}, has_model=shared.get("speculative_method") not in names.MODEL_FREE_METHODS)
    if method in names.MODEL_FREE_METHODS:
        return _Drafting({"method": str(method)})
    if options.model == bundled.DEMO:
        return _Drafting({"model": str(bundled.demo_pair().draft)}, has_model=True)
    return _Drafting({"method": names.SUFFIX})  # it needs no model


def _devices(options: UpOptions, shared: Mapping[str, Any]) -> dict[str, str]:
    in_file = shared.get("draft_devices")
    try:
        draft = None if in_file is None else names.as_torch(str(in_file))
    except ValueError as error:
        raise ConfigurationError(f"draft_devices is {str(in_file)!r}; {error}") from None
    return {
        "target": options.target_device or options.device,
        "draft": options.draft_device or draft or options.device,
    }


def _shares(
    options: UpOptions, shared: Mapping[str, Any], devices: Mapping[str, str]
) -> dict[str, float | None]:
    """Shares of a device's memory; None where the service's own default or its environment decides.

    `devices` are those of both models; none where only the target has one.
    """
    shares = {"target": options.target_memory_utilization, "draft": options.draft_memory_utilization}
    places = {f"{device}:0" if device == "cuda" else device for device in devices.values()}
    if len(places) != 1 or places == {"cpu"}:
        return shares
    for name, default in SHARES.items():
        is_set = "device_memory_utilization" in _variables_of(_SERVICES[name], os.environ)
        is_in_file = name == "draft" and "device_memory_utilization" in shared
        if shares[name] is None and not is_set and not is_in_file:
            shares[name] = default
    if (total := sum(share for share in shares.values() if share is not None)) > 1:
        raise ConfigurationError(
            f"--target-memory-utilization is {shares['target']:g} and --draft-memory-utilization is "
            f"{shares['draft']:g}, {total:g} of {devices['target']} together; it must be at most 1"
        )
    return shares


def _http_port(wanted: int | None) -> int:
    """The port for HTTP: the wanted one, or the usual one if it is free, or 0 for any."""
    if wanted is not None:
        return wanted
    try:
        socket.create_server(("127.0.0.1", HTTP_PORT)).close()
    except OSError:
        return 0
    return HTTP_PORT


def typed_program() -> str:
    """The `tandem` command as it can be typed here: by its name where that is on the path, else by its place."""
    called = Path(sys.argv[0])
    is_on_path = shutil.which("tandem") == str(called.absolute())
    return "tandem" if is_on_path or called.name != "tandem" else str(called)


def next_command(address: str, model: str) -> str:
    """A command that tries the model over the coordinator at that address, as it can be typed here."""
    program = typed_program()
    where = [] if address == f"127.0.0.1:{DEFAULT_PORT}" else ["--address", address]
    words = ["chat"] if model == bundled.SMOLLM2 else ["generate", "def main():", "--max-tokens", "64"]
    return shlex.join([program, *words, *where])


def _check_model(option: str, reference: str) -> str:
    """A model as it was named, unless it can be neither a folder nor a name of one elsewhere."""
    path = Path(reference).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ConfigurationError(f"{option} is {reference}; a file is there, and it must be a model's folder")
    if reference != bundled.SMOLLM2 and not is_model_id(reference):
        others = f", or {', '.join((*names.MODEL_FREE_METHODS, NO_DRAFT))}" if option == "--draft" else ""
        raise ConfigurationError(
            f"{option} is {reference}; there is no such folder: name a model's folder or a Hugging Face id{others}"
        )
    return reference


def as_words(**values: object) -> list[str]:
    """Options as a command line has them, without those that are None."""
    given = {_flag(name): str(value) for name, value in values.items() if value is not None}
    return [word for option in given.items() for word in option]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_PHASES = ("loading", "warming up", "ready")
"""Words that begin the phases of a model's service, in order.

The bar counts phases and no bytes, which would mislead: of SmolLM2's start on a CPU, importing torch takes 8.1
processor seconds, packing and trying the kernels 2.2, and reading the weights 0.8.
"""


def _phase_number(phase: str) -> int:
    return next((index for index, words in enumerate(_PHASES, 1) if phase.startswith(words)), 0)


_HTTP = "http on "
_DRAFTING = "drafting "
_READY = "ready on "
"""How the coordinator's news begin that are passed on. The last one ends its start."""


async def read_start(coordinator: Child) -> dict[str, str]:
    """The news of a coordinator's start by how they begin: the rest of each line."""
    news: dict[str, str] = {}
    async for line in coordinator.lines():
        words = line.removeprefix("tandem coordinator: ")
        for mark in (_HTTP, _DRAFTING, _READY):
            if words.startswith(mark):
                news[mark] = words.removeprefix(mark)
        if _READY in news:
            return news
    raise ServiceUnavailableError(await coordinator.obituary())


class _Cluster:
    """The services while they run. A terminal has a bar with their phases, elsewhere each phase has a line."""

    def __init__(self, arguments: ServiceArguments, folder: Path) -> None:
        """`folder` is for the sockets of the models' services."""
        self._arguments = arguments
        self._folder = folder
        services = {"target": arguments.target, "draft": arguments.draft}
        self._models = {name: words for name, words in services.items() if words is not None}
        self._children: list[Child] = []
        self._phases = dict.fromkeys(self._models, "starting")
        """Of the models; empty once nothing is shown any more."""
        self._progress = Progress("tandem up", sys.stdout)

    async def run(self) -> None:
        """Run until a signal, or until a child ends."""
        self._progress.start()
        self._tell(f"starting {' and '.join(self._models)}")
        with stop_signals(before_end=self._kill) as stopping, suppress(CancelledByEventError):
            await unless(self._wait_for_stop(stopping), self._serve())

    def _tell(self, news: str) -> None:
        """A bar shows all phases; elsewhere each has a line when it begins."""
        if not sys.stdout.isatty():
            announce(f"tandem up: {news}")
        reached = sum(_phase_number(phase) for phase in self._phases.values())
        words = ", ".join(f"{name}: {phase}" for name, phase in self._phases.items())
        self._progress.show(words, reached / (len(_PHASES) * len(self._phases)))

    def _end_phases(self) -> None:
        self._phases = {}
        self._progress.stop()

    async def _wait_for_stop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._end_phases()
        announce(
            "tandem up: stopping when running requests have ended; press Ctrl-C again to end them at once"
        )

    def _kill(self) -> None:
        for child in self._children:
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)  # this process ends at once

    async def _serve(self) -> None:
        # The stack ends the coordinator first: it drains while the models still answer it.
        async with AsyncExitStack() as stack:
            stack.callback(self._end_phases)
            started = {}
            for name, words in self._models.items():
                listens = as_words(host=socket_of(self._folder, name))
                started[name] = await self._child(stack, name, [*words, *listens])
            addresses = {
                f"{name}_address": await child.line("listening on ") for name, child in started.items()
            }
            for name, child in started.items():
                stack.callback(asyncio.create_task(self._follow(name, child)).cancel)
            words = [*self._arguments.coordinator, *as_words(**addresses)]
            coordinator = await self._child(stack, "coordinator", words)
            ends = {asyncio.create_task(child.process.wait()): child for child in self._children}
            ready = asyncio.create_task(self._tell_when_ready(coordinator))
            stack.callback(ready.cancel)  # first, or it would see the coordinator's end
            await asyncio.wait({*ends, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()  # raises where stdout cannot be written
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ended = next(child for end, child in ends.items() if end.done())
            raise ServiceUnavailableError(f"{await ended.obituary()}; the other services were stopped")

    async def _child(self, stack: AsyncExitStack, name: str, arguments: Sequence[str]) -> Child:
        child = await Child.start(name, SERVICES[name], arguments, STOP_SECONDS)
        self._children.append(child)
        stack.push_async_callback(lambda: asyncio.shield(child.stop()))
        return child

    async def _follow(self, name: str, child: Child) -> None:
        """Show the phases that a service reaches."""
        async for line in child.lines():
            phase = line.removeprefix(f"tandem {name}: ").partition(" on ")[0]
            # A service says from time to time that it still loads; so does this command.
            if self._phases and _phase_number(phase) > _phase_number(self._phases[name]):
                self._phases[name] = phase
                self._tell(f"{name}: {phase}")

    async def _tell_when_ready(self, coordinator: Child) -> None:
        """End the start with its address, the page and the next command."""
        with suppress(ServiceUnavailableError):  # its end is told otherwise
            news = await read_start(coordinator)
            address = news[_READY]
            url = news.get(_HTTP)
            self._end_phases()
            announce(f"tandem up: ready on {address}")
            if url is not None:
                announce(f"tandem up: page on {url}/ (OpenAI's API under {url}/v1)")
            if _DRAFTING in news:
                announce(f"tandem up: {_DRAFTING}{news[_DRAFTING]}")
            announce(f"tandem up: next, in another terminal: {next_command(address, self._arguments.model)}")

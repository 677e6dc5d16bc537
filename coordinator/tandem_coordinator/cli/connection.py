"""How a command reaches its coordinator: its options, the named contexts, and `tandem context`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
import yaml
from pydantic import AfterValidator, Field
from pydantic.fields import FieldInfo
from pydantic_settings import InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tandem.clients.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient
from tandem.clients.client import DEFAULT_ADDRESS
from tandem.errors import ConfigurationError
from tandem.rpc.addresses import parse_address
from tandem.rpc.credentials import Credentials
from tandem_coordinator.cli.command import OutputOptions, Variables, VerbOptions, command, plain_table
from tandem_coordinator.cli.main import CommandGroup, app


@dataclass(slots=True)
class Contexts:
    """Content of the file."""

    path: Path
    current: str = ""
    """Name of the current context; empty: none."""
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, name: str) -> Mapping[str, Any]:
        if name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ConfigurationError(f"there is no context {name!r}; {self.path} has: {known}")
        return self.by_name[name]

    def save(self) -> None:
        """Write the file, for its owner's eyes only: it may hold a token."""
        content = {"current": self.current, "contexts": self.by_name}
        # Written beside the file and moved over it: a reader never finds half a file.
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch.touch(mode=0o600)
            scratch.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
            scratch.replace(self.path)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror}") from None


def read_contexts() -> Contexts:
    """Content of the file, by the XDG base directory specification; empty when there is none."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    path = base.expanduser() / "tandem" / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return Contexts(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    by_name = content.get("contexts") or {} if isinstance(content, dict) else None
    if not isinstance(by_name, dict) or not all(isinstance(value, dict) for value in by_name.values()):
        raise ConfigurationError(f"{path} must hold `contexts`, each a name with its settings")
    return Contexts(path, str(content.get("current") or ""), by_name)


class Endpoint(NamedTuple):
    """The first arguments of each client."""

    address: str
    credentials: Credentials


class _Context(PydanticBaseSettingsSource):
    """The context that a stronger source names, or the current one."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        contexts = read_contexts()
        name = self.current_state.get("context") or contexts.current
        return dict(contexts.get(name)) if name else {}


def _check_address(value: str) -> str:
    scheme, is_url, rest = value.partition("://")
    if is_url:
        raise ValueError(
            f"it must be host:port without {scheme}://, for instance {rest.rstrip('/')!r}"
            + (", and --tls where the coordinator has a certificate" if scheme == "https" else "")
        )
    try:
        parse_address(value)
    except ValueError:
        raise ValueError(f"it must be host:port, for instance {DEFAULT_ADDRESS}") from None
    return value


class SavedConnection(VerbOptions):
    """A connection as a context holds it."""

    address: Annotated[str, AfterValidator(_check_address)] = DEFAULT_ADDRESS
    """host:port of the coordinator."""
    tls: Annotated[bool | None, typer.Option("--tls/--no-tls")] = None
    """Connect by TLS."""
    tls_ca_file: Path | None = None
    """PEM file of the authorities to trust; implies --tls."""
    tls_cert_file: Path | None = None
    """PEM file of your own certificate, for mutual TLS."""
    tls_key_file: Path | None = None
    """PEM file of its key."""
    tls_server_name: str | None = None
    """Name in the server's certificate, where not the address's."""
    token: str | None = None
    """Bearer token; better in the environment or in --token-file."""
    token_file: Path | None = None
    """File whose first line is the token."""


class Connection(SavedConnection):
    """Where a coordinator is, and how to reach it.

    The command line is strongest, then the environment, then a context; one that the command line names is stronger
    than the environment.
    """

    model_config = SettingsConfigDict(extra="ignore")

    with_variables: ClassVar[tuple[str, ...]] = (*SavedConnection.model_fields, "context", "timeout")

    context: str | None = None
    """Context to take these from; see tandem context --help."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds to wait for an answer. [default: 10; generate: no limit]"""

    @classmethod
    def sources(cls, given: InitSettingsSource) -> tuple[PydanticBaseSettingsSource, ...]:
        """The command line, the environment and the context."""
        words = given()
        if "token" in words:
            # A file is stronger, and that of another source is not meant.
            given = InitSettingsSource(cls, {"token_file": None} | words)
        variables = Variables(cls)
        context = _Context(cls)
        if "context" in words:
            return (given, context, variables)
        return (given, variables, context)

    @property
    def endpoint(self) -> Endpoint:
        """Raises a ConfigurationError for files that cannot be read."""
        return Endpoint(self.address, Credentials.of(self.model_dump()))

    def admin_client(self) -> AdminClient:
        """A client of that coordinator."""
        return AdminClient(*self.endpoint, self.timeout or DEFAULT_TIMEOUT_SECONDS)


context = CommandGroup(
    "Save connections to coordinators under names.\n\n"
    "Contexts are saved in ~/.config/tandem/config.yaml ($XDG_CONFIG_HOME). Options of a command and the environment "
    "override the current context; a context named with --context overrides the environment.",
    app,
    "context",
)

Name = Annotated[str, typer.Argument(help="The context's name.")]


@command(context, "")
def list_contexts(output: OutputOptions) -> None:
    """List the contexts; the current one is marked."""
    contexts = read_contexts()
    entries = []
    table = plain_table("", "NAME", "ADDRESS", "TLS", "TOKEN")
    for name, values in contexts.by_name.items():
        is_current = name == contexts.current
        shown = {each: value for each, value in values.items() if each != "token"}
        entries.append({"name": name, "current": is_current} | shown)
        by_tls = values.get("tls") or "tls_ca_file" in values or "tls_cert_file" in values
        address = values.get("address", DEFAULT_ADDRESS)
        token_file = values.get("token_file", "")
        table.add_row("*" if is_current else "", name, address, "yes" if by_tls else "no", token_file)
    output.show(entries, lambda: table)


@command(context, "staging")
def use(name: Name) -> None:
    """Make a context the current one."""
    contexts = read_contexts()
    contexts.get(name)
    contexts.current = name
    contexts.save()


@command(
    context,
    "local --address 127.0.0.1:50051",
    "staging --address staging.example.org:50051 --tls-ca-file ca.pem --token-file token",
)
def set_context(name: Name, settings: SavedConnection) -> None:
    """Create a context, or change the given options of one. The first one becomes the current one."""
    contexts = read_contexts()
    changes = {
        key: str(value.expanduser().absolute()) if isinstance(value, Path) else value
        for key, value in settings.model_dump(exclude_unset=True).items()
    }
    if not changes:
        raise ConfigurationError("nothing was given to set; give at least --address")
    contexts.by_name[name] = contexts.by_name.get(name, {}) | changes
    contexts.current = contexts.current or name
    contexts.save()


@command(context, "staging")
def delete(name: Name) -> None:
    """Delete a context."""
    contexts = read_contexts()
    contexts.get(name)
    del contexts.by_name[name]
    if contexts.current == name:
        contexts.current = ""
    contexts.save()

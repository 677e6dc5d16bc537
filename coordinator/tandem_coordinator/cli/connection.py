"""How a command reaches its coordinator: its options, the named contexts, and `tandem context`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tandem.clients.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient
from tandem.clients.client import DEFAULT_ADDRESS
from tandem.config.options import Options, sentences
from tandem.errors import ConfigurationError
from tandem.rpc.addresses import parse_address
from tandem.rpc.credentials import Credentials
from tandem_coordinator.cli.command import OutputOptions, command, option, plain_table
from tandem_coordinator.cli.main import CommandGroup, app

_VARIABLES = "TANDEM_CLIENT_"
"""Begins the variables of clients."""


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


class Connection(Options, BaseSettings):
    """Where a coordinator is, and how to reach it.

    The command line is strongest, then the environment, then a context; one that the command line names is stronger
    than the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=_VARIABLES, env_ignore_empty=True, extra="ignore", validate_default=False
    )

    address: str = DEFAULT_ADDRESS
    tls: bool | None = None
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_server_name: str | None = None
    token: str | None = None
    token_file: Path | None = None
    context: str | None = None
    timeout: float | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *others: PydanticBaseSettingsSource,
        **named: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The command line, the environment and the context."""
        context = _Context(settings_cls)
        is_by_hand = "context" in init_settings()
        return (
            (init_settings, context, env_settings) if is_by_hand else (init_settings, env_settings, context)
        )

    @property
    def endpoint(self) -> Endpoint:
        """Raises a ConfigurationError where it is none."""
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigurationError(f"--timeout is {self.timeout:g}; it must be above 0")
        return Endpoint(_address(self.address), Credentials.of(self.model_dump()))


@dataclass(frozen=True)
class ConnectionSettings:
    """Options of a connection that a context holds; None where the command line does not have them."""

    address: str | None = option("host:port of the coordinator.")
    tls: bool | None = option("Connect by TLS.", "--tls/--no-tls")
    tls_ca_file: Path | None = option("PEM file of the authorities to trust; implies --tls.")
    tls_cert_file: Path | None = option("PEM file of your own certificate, for mutual TLS.")
    tls_key_file: Path | None = option("PEM file of its key.")
    tls_server_name: str | None = option("Name in the server's certificate, where not the address's.")
    token: str | None = option("Bearer token; better in the environment or in --token-file.")
    token_file: Path | None = option("File whose first line is the token.")

    @property
    def given(self) -> dict[str, Any]:
        """Those that the command line has."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ConnectionOptions(ConnectionSettings):
    """Options of a connection, and the name of a context for those that are not set."""

    context: str | None = option("Context to take these from; see tandem context --help.")
    timeout: float | None = option("Seconds to wait for an answer. [default: 10; generate: no limit]")

    def read(self) -> Connection:
        """The connection, with what the environment and the contexts say."""
        given = self.given
        if "token" in given:
            given.setdefault(
                "token_file", None
            )  # a file is stronger, and that of another source is not meant
        try:
            return Connection(**given)
        except ValidationError as error:
            raise ConfigurationError("; ".join(sentences(error))) from None

    def admin_client(self) -> AdminClient:
        """A client of that coordinator."""
        connection = self.read()
        return AdminClient(*connection.endpoint, connection.timeout or DEFAULT_TIMEOUT_SECONDS)


for _each in fields(ConnectionOptions):
    _each.metadata["typer"].help += f" [env var: {_VARIABLES}{_each.name.upper()}]"


def _address(value: str) -> str:
    scheme, is_url, rest = value.partition("://")
    if is_url:
        raise ConfigurationError(
            f"address is {value!r}; it must be host:port without {scheme}://, for instance {rest.rstrip('/')!r}"
            + (", and --tls where the coordinator has a certificate" if scheme == "https" else "")
        )
    try:
        parse_address(value)
    except ValueError:
        raise ConfigurationError(
            f"address is {value!r}; it must be host:port, for instance {DEFAULT_ADDRESS}"
        ) from None
    return value


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
    contexts, entries = read_contexts(), []
    table = plain_table("", "NAME", "ADDRESS", "TLS", "TOKEN")
    for name, values in contexts.by_name.items():
        is_current = name == contexts.current
        shown = {each: value for each, value in values.items() if each != "token"}
        entries.append({"name": name, "current": is_current} | shown)
        by_tls = values.get("tls") or "tls_ca_file" in values or "tls_cert_file" in values
        address, token_file = values.get("address", DEFAULT_ADDRESS), values.get("token_file", "")
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
def set_context(name: Name, settings: ConnectionSettings) -> None:
    """Create a context, or change the given options of one. The first one becomes the current one."""
    contexts = read_contexts()
    changes = {
        key: str(value.expanduser().absolute()) if isinstance(value, Path) else value
        for key, value in settings.given.items()
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

"""How a command reaches its coordinator: the options, and the sources of their values.

Sources, the strongest first: the command line, the context that --context names, the environment, the current context,
the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli.contexts.file import Contexts, read_contexts
from tandem.clients.aio import DEFAULT_ADDRESS
from tandem.errors import ConfigurationError
from tandem.rpc.credentials import Credentials

ENVIRONMENT_PREFIX = "TANDEM_CLIENT_"


def _option(name: str, help_text: str) -> Any:
    return typer.Option(
        f"--{name.replace('_', '-')}", help=help_text, envvar=f"{ENVIRONMENT_PREFIX}{name.upper()}"
    )


@dataclass(frozen=True)
class ConnectionSettings:
    """Fields of a context; None where unset."""

    address: Annotated[str | None, _option("address", "host:port of the coordinator.")] = None
    tls: Annotated[
        bool | None, typer.Option("--tls/--no-tls", help="Connect by TLS.", envvar=f"{ENVIRONMENT_PREFIX}TLS")
    ] = None
    tls_ca_file: Annotated[
        Path | None, _option("tls_ca_file", "PEM file of the authorities to trust; implies --tls.")
    ] = None
    tls_cert_file: Annotated[
        Path | None, _option("tls_cert_file", "PEM file of your own certificate, for mutual TLS.")
    ] = None
    tls_key_file: Annotated[Path | None, _option("tls_key_file", "PEM file of its key.")] = None
    tls_server_name: Annotated[
        str | None, _option("tls_server_name", "Name in the server's certificate, where not the address's.")
    ] = None
    token: Annotated[
        str | None, _option("token", "Bearer token; better in the environment or in --token-file.")
    ] = None
    token_file: Annotated[Path | None, _option("token_file", "File whose first line is the token.")] = None


@dataclass(frozen=True)
class ConnectionOptions(ConnectionSettings):
    """Connection options, and the name of a context for those that are not set."""

    context: Annotated[
        str | None, _option("context", "Context to take these from; see tandem context --help.")
    ] = None
    timeout: Annotated[
        float | None, _option("timeout", "Seconds to wait for an answer. [default: 10; generate: no limit]")
    ] = None


@dataclass(frozen=True, slots=True)
class Connection:
    """Address of the coordinator, and how to connect to it."""

    address: str
    credentials: Credentials
    timeout_seconds: float | None
    """None: the command's own."""


SETTING_NAMES = tuple(field.name for field in fields(ConnectionSettings))


def connect(options: ConnectionOptions, click: typer.Context) -> Connection:
    """Merge the options, the environment and the contexts.

    Raises:
        ConfigurationError: there is no such context, or an option has a value that it cannot have.
    """
    given = {name: value for name, value in asdict(options).items() if value is not None}
    by_hand = {name for name in given if is_by_hand(click, name)}
    values = merged(given, by_hand, read_contexts())
    if options.timeout is not None and not options.timeout > 0:
        raise ConfigurationError(f"--timeout is {options.timeout:g}; it must be above 0")
    return Connection(
        address=_address(values.get("address", DEFAULT_ADDRESS)),
        credentials=Credentials(
            ca_file=_path(values.get("tls_ca_file")),
            cert_file=_path(values.get("tls_cert_file")),
            key_file=_path(values.get("tls_key_file")),
            server_name=values.get("tls_server_name", ""),
            token=values.get("token", ""),
            token_file=_path(values.get("token_file")),
            tls=values.get("tls", False),
        ),
        timeout_seconds=options.timeout,
    )


def merged(given: Mapping[str, Any], by_hand: set[str], contexts: Contexts) -> dict[str, Any]:
    """The strongest value of each setting.

    Args:
        given: From the command line and the environment.
        by_hand: Those of them that the command line has.
        contexts: The user's.

    Raises:
        ConfigurationError: there is no such context.
    """
    environment = {name: value for name, value in given.items() if name not in by_hand}
    command_line = {name: value for name, value in given.items() if name in by_hand}
    name = given.get("context") or contexts.current
    context = dict(contexts.get(name)) if name else {}
    if "context" in by_hand:
        return environment | context | command_line
    return context | environment | command_line


def is_by_hand(click: typer.Context, name: str) -> bool:
    """True if the command line has the option, rather than the environment."""
    source = click.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()


def _address(value: str) -> str:
    if value.startswith("unix:"):
        return value
    scheme, is_url, rest = value.partition("://")
    if is_url:
        raise ConfigurationError(
            f"address is {value!r}; it must be host:port without {scheme}://, for instance {rest.rstrip('/')!r}"
            + (", and --tls where the coordinator has a certificate" if scheme == "https" else "")
        )
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"address is {value!r}; it must be host:port, for instance {DEFAULT_ADDRESS}"
        )
    return value

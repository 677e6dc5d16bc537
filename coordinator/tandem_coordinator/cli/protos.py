"""`tandem protos`: writes the .proto files, from which other languages generate their clients and services."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import ConfigurationError
from tandem_coordinator.cli.command import command
from tandem_coordinator.cli.main import app

_PACKAGE = "tandem.v1"


@command(app, "api && protoc -I api --cpp_out . tandem/v1/draft.proto tandem/v1/types.proto")
def protos(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")]) -> None:
    """Write the .proto files of Tandem's services to DIR/tandem/v1, and print where each one is.

    DIR is made if it does not exist, and is the folder that protoc and buf import from. Files that are there from an
    earlier version are replaced.
    """
    sources = sorted(
        (source for source in files(_PACKAGE).iterdir() if source.name.endswith(".proto")),
        key=lambda source: source.name,
    )
    if not sources:
        raise ConfigurationError(
            "this installation has no .proto files; in a checkout, make protos brings them"
        )
    destination = folder.joinpath(*_PACKAGE.split("."))
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = destination / source.name
            path.write_bytes(source.read_bytes())
            sys.stdout.write(f"{path}\n")
    except OSError as error:
        raise ConfigurationError(
            f"{str(destination)!r} cannot be written: {error.strerror}; name a folder in which files may be made"
        ) from None

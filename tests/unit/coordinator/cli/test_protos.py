"""`tandem protos`: the .proto files of an installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Commands
from tests.paths import ROOT

SOURCES = sorted((ROOT / "protos" / "tandem" / "v1").glob("*.proto"))


def test_the_protos_are_written_as_they_are_and_compile_from_there(
    commands: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "new"
    printed = commands.succeed("protos", str(folder))
    assert commands.succeed("protos", str(folder)) == printed, "files that are there are replaced"
    written = [Path(line) for line in printed.splitlines()]
    assert [path.relative_to(folder) for path in written] == [
        source.relative_to(ROOT / "protos") for source in SOURCES
    ]
    assert [path.read_bytes() for path in written] == [source.read_bytes() for source in SOURCES]
    compiler = (sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_out={tmp_path / 'set'}")
    subprocess.run([*compiler, "-I", str(folder), *map(str, written)], check=True)


@pytest.mark.parametrize("inside", ["", "folder"])
def test_a_folder_that_cannot_be_made_has_one_sentence(
    commands: Commands, tmp_path: Path, inside: str
) -> None:
    (tmp_path / "file").touch()
    sentence = commands.fail(2, "protos", str(tmp_path / "file" / inside))
    assert str(tmp_path / "file") in sentence
    assert "cannot be written" in sentence


def test_without_a_folder_the_sentence_names_it(commands: Commands) -> None:
    assert "missing argument 'DIR'" in commands.fail(2, "protos")

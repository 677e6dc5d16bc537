"""Compile the protos into `tandem/v1`: messages, gRPC stubs, and type stubs for both, with the protos beside them.

The build hook runs this for every install and wheel, and `make protos` runs it by hand. The path of a proto
below `protos/` is the import path of its module, so what protoc writes is used as it is, with no rewriting.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("tandem", "v1")
OUTPUT_SUFFIXES = (".proto", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
"""The protos themselves are copied, so that `tandem protos` finds them in a checkout and in a wheel alike."""
INIT_TEXT = '"""Generated from `protos/tandem/v1`; never edited."""\n'


class ProtoError(Exception):
    """The protos do not compile, or there are none; the message says where and why."""


def generate(root: Path = ROOT) -> list[Path]:
    """Bring `tandem/v1` below `root` up to date, and return the files it consists of."""
    sources = sorted((root / "protos" / PACKAGE).glob("*.proto"))
    if not sources:
        raise ProtoError(f"no .proto file in {root / 'protos' / PACKAGE}")
    outputs = _expected_outputs(root / PACKAGE, sources)
    if not _is_current(root / PACKAGE, sources, outputs):
        # Compiled aside, then moved file by file: a proto that does not parse leaves the last good modules in
        # place, and a program that is importing them meanwhile never finds one half written.
        with tempfile.TemporaryDirectory(prefix=".protos-", dir=root) as scratch:
            _compile(root / "protos", sources, Path(scratch))
            _install(Path(scratch) / PACKAGE, root / PACKAGE, outputs)
    return outputs


def _expected_outputs(package: Path, sources: list[Path]) -> list[Path]:
    modules = [package / f"{source.stem}{suffix}" for source in sources for suffix in OUTPUT_SUFFIXES]
    return [package / "__init__.py", *modules]


def _is_current(package: Path, sources: list[Path], outputs: list[Path]) -> bool:
    # The exact set counts, not only the times: the modules of a proto that was deleted must go too.
    if set(_generated_files(package)) != set(outputs):
        return False
    newest_input = max(path.stat().st_mtime_ns for path in [*sources, Path(__file__)])
    return newest_input < min(path.stat().st_mtime_ns for path in outputs)


def _generated_files(package: Path) -> list[Path]:
    found = [*package.glob("*.proto"), *package.glob("*.py*")]
    return [path for path in found if path.is_file()]


def _compile(proto_root: Path, sources: list[Path], destination: Path) -> None:
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        f"--proto_path={proto_root}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
        f"--python_out={destination}",
        f"--grpc_python_out={destination}",
        f"--mypy_out=quiet:{destination}",
        # Every server and client here is grpc.aio; stubs for both worlds would type each value as a union.
        f"--mypy_grpc_out=quiet,only_async:{destination}",
        *(source.relative_to(proto_root).as_posix() for source in sources),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ProtoError(f"the protos in {proto_root} do not compile:\n{result.stderr.strip()}")
    (destination / PACKAGE / "__init__.py").write_text(INIT_TEXT, encoding="utf-8")
    for source in sources:
        shutil.copyfile(source, destination / PACKAGE / source.name)


def _plugin(name: str) -> str:
    # An isolated build puts its own scripts on PATH, and they must win over those of the environment around.
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    found = shutil.which(name, path=search_path)
    if found is None:
        raise ProtoError(f"{name} is not installed; it comes with mypy-protobuf, which the `dev` extra holds")
    return found


def _install(compiled: Path, package: Path, outputs: list[Path]) -> None:
    package.mkdir(parents=True, exist_ok=True)
    for output in outputs:
        (compiled / output.name).replace(output)
    for stale in set(_generated_files(package)) - set(outputs):
        stale.unlink()


if __name__ == "__main__":
    try:
        generate()
    except ProtoError as error:
        sys.exit(f"error: {error}")

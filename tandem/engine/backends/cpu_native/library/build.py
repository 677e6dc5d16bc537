"""Compiles the kernels, once for each processor, and keeps the result.

The build of a wheel runs this file by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("source") / "kernels.cpp"

OBJECTS = Path(__file__).with_name("objects")
"""Folder of compiled kernels in a wheel; a checkout has none."""

TARGETS = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "avx512-bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "amx-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
"""The processors that a wheel has kernels for, each with the compiler's flags; later ones are faster."""

WARNING_FLAGS = ("-Wall", "-Wextra")

_NATIVE = ("-march=native",)
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
          "-fopenmp")  # fmt: skip
_ROOM_BYTES = 4 << 20
"""Room for an object and a library of 0.5 MB each, with much to spare."""
START_SECONDS = 300.0
"""Time to compile while a service starts. A quiet core takes 8 seconds; a share of a busy one takes longer."""
_WHEEL_SECONDS = 3600.0
"""Time to compile for a wheel, which would be slower on every machine without."""
_COMPILERS = ("c++", "g++", "clang++")
_CPU_DESCRIPTION = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


class BuildError(Exception):
    """The kernels cannot be compiled or loaded here; the text says why. Never leaves the engine."""


def built_kernels(folder: Path | None = None, target: str | None = None) -> Path:
    """The shared library, compiled now unless it was before."""
    compiler = _compiler()
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tandem", "kernels")
    _make_private(folder)
    flags = (*_FLAGS, *(_NATIVE if target is None else TARGETS[target]))
    processor = _processor() if target is None else ""
    library = folder / f"kernels-{_fingerprint(compiler, flags, processor)}.so"
    if not library.is_file():
        _compile(compiler, flags, library, START_SECONDS if target is None else _WHEEL_SECONDS)
    return library


def _compiler() -> str:
    named = os.environ.get("CXX")
    for candidate in (named,) if named else _COMPILERS:
        if path := shutil.which(candidate):
            return path
    raise BuildError(f"no C++ compiler: {named or ', '.join(_COMPILERS)} not found")


def _make_private(folder: Path) -> None:
    """Makes sure that no other user can write to the folder, since its libraries will be run."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BuildError(f"no folder for compiled kernels: {error}; name one with --compile-cache") from None
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BuildError(f"others can write to {folder}; name another folder with --compile-cache")


def _fingerprint(compiler: str, flags: Sequence[str], processor: str) -> str:
    """Differs whenever the compiled code might: a home folder may be shared by different machines."""
    known = hashlib.sha256()
    for source in sorted(SOURCE.parent.iterdir()):
        known.update(source.read_bytes())
    for part in (*flags, compiler, _run([compiler, "--version"]).stdout, platform.machine(), processor):
        known.update(part.encode() + b"\0")
    return known.hexdigest()[:16]


def _processor() -> str:
    if not _CPU_DESCRIPTION.is_file():
        return platform.processor()
    lines = _CPU_DESCRIPTION.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(_CPU_LINES)}))


def _compile(compiler: str, flags: Sequence[str], library: Path, seconds: float) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            room = Path(folder, "room")
            room.write_bytes(bytes(_ROOM_BYTES))  # a full disk is noticed now, not after the compilation
            room.unlink()
            logger.info("compiling kernels", extra={"compiler": compiler, "folder": str(library.parent)})
            compiled = Path(folder, "kernels.o")
            linked = Path(folder, "kernels.so")
            done = _run([compiler, *flags, *WARNING_FLAGS, "-c", str(SOURCE), "-o", str(compiled)], seconds)
            if warnings := done.stderr.strip():
                first = "\n".join(warnings.splitlines()[:20])
                logger.warning("compiler warnings", extra={"compiler": compiler, "warnings": first})
            # Linked without OpenMP: the runtime that torch has loaded serves. With another, two sets of threads would
            # wait for each other's cores.
            _run([compiler, "-shared", str(compiled), "-o", str(linked)])
            linked.replace(library)
    except OSError as error:
        raise BuildError(f"the kernels could not be written: {error}") from None


def _run(command: list[str], seconds: float = START_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a compiler, which starts processes of its own. All of them end with this process, however it ends: the pipe
    closes, and `_end_with_parent` notices."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, *command],
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        os.close(writer)
        raise BuildError(f"{command[0]} did not run: {error}") from None
    finally:
        os.close(reader)
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} did not run: {error}") from None
        finally:
            os.close(writer)
    if process.returncode:
        reason = (errors.strip() or f"exit code {process.returncode}").splitlines()[0]
        raise BuildError(f"{command[0]} failed: {reason}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _end_with_parent() -> None:
    """Ends this process and the compiler's, which are a group of their own, when the other end of stdin closes."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


def _run_as_child(command: Sequence[str]) -> int:
    """Body of the process that `_run` starts."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        return abs(subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1


_V3: Final = frozenset(
    ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm",
     "movbe", "xsave")
)  # fmt: skip
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_NEEDED: Final = {
    "x86-64-v3": _V3,
    "avx512": _V4,
    "avx512-bf16": _V4 | {"avx512_bf16"},
    "amx-bf16": _V4 | {"avx512_bf16", "amx_tile", "amx_bf16"},
}
"""Flags of a processor, in Linux's spelling, by target. The levels are those of the x86-64 psABI."""


def bundled_kernels(folder: Path = OBJECTS, flags: frozenset[str] | None = None) -> Path | None:
    """The fastest library of a folder that a processor can run; None in a checkout, or if it is not x86-64."""
    flags = _flags() if flags is None else flags
    for target in reversed(TARGETS):
        library = folder / f"{target}.so"
        if _NEEDED[target] <= flags and library.is_file():
            return library
    return None


def _flags() -> frozenset[str]:
    if platform.machine() != "x86_64" or not _CPU_DESCRIPTION.is_file():
        return frozenset()
    for line in _CPU_DESCRIPTION.read_text().splitlines():
        name, _, words = line.partition(":")
        if name.strip() == "flags":
            return frozenset(words.split())
    return frozenset()


if __name__ == "__main__":
    sys.exit(_run_as_child(sys.argv[1:]))

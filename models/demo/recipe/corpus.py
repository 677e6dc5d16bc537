"""The corpus: the sources of the CPython standard library, split by file into training and held-out text."""

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 4

# Tests are as large as the library itself and repeat themselves; the others are generated tables, not code.
EXCLUDED_FOLDERS = frozenset(
    {
        "__pycache__",
        "encodings",
        "idlelib",
        "lib-dynload",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "idle_test",
    }
)
EXCLUDED_FILES = frozenset({"entities.py"})
EXCLUDED_PREFIXES = ("_sysconfigdata",)


@dataclass(frozen=True)
class SourceFile:
    """One module of the library: its path relative to the library's root, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The library's modules; nothing, not even the tokenizer, ever learns from those that are held out."""

    training: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def read_corpus() -> Corpus:
    """Read the running interpreter's standard library and split it."""
    files = tuple(_source_files(Path(sysconfig.get_paths()["stdlib"])))
    return Corpus(
        training=tuple(file for file in files if not is_held_out(file.name)),
        held_out=tuple(file for file in files if is_held_out(file.name)),
    )


def is_held_out(name: str) -> bool:
    """True if a file is held out: a property of its name alone, so it is the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def _source_files(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_excluded(relative):
            continue
        text = _read_source(path)
        if text:
            yield SourceFile(relative.as_posix(), text)


def _is_excluded(relative: Path) -> bool:
    if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
        return True
    return relative.name in EXCLUDED_FILES or relative.name.startswith(EXCLUDED_PREFIXES)


def _read_source(path: Path) -> str | None:
    # A module states its own encoding; the few that cannot be decoded are samples of broken files.
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None

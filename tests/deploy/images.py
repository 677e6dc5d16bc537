"""The content of an image, read from the Dockerfile: our code as the wheel has it, and what pip would install.

No engine is needed, and nothing is downloaded: the packages are those of the environment that runs the tests.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from deploy.requirements import requirements
from tests.paths import ROOT

VENV = "/opt/tandem"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"{VENV}/lib/{PYTHON}/site-packages"
"""Where the image has its packages, for the Python that runs the tests."""

_EXTRAS = {"coordinator-packages": [], "model-packages": ["engine"]}


@dataclass(frozen=True, slots=True)
class Image:
    """Where each thing in an image comes from on this machine, and what a container of it is started with."""

    name: str
    files: dict[str, Path]
    packages: set[str]
    environment: dict[str, str]
    user: str
    workdir: str
    entrypoint: list[str]
    health_check: list[str]
    ready: str = "ready on "
    """The line that a container prints once it is ready."""

    def holds(self, module: str) -> bool:
        """Return True if the image has a package of this name."""
        return any(f"{place}/".startswith(f"{SITE}/{module}/") for place in self.files)


def ignored(path: PurePosixPath, patterns: Iterable[str]) -> bool:
    """Return True if .dockerignore excludes a path; the last matching pattern decides."""
    verdict = False
    for pattern in patterns:
        keep = pattern.startswith("!")
        glob = pattern.removeprefix("!")
        candidates = [path, *path.parents]
        if glob.startswith("**/"):
            matches = any(part.name == glob.removeprefix("**/") for part in candidates)
        else:
            matches = any(str(part) == glob or (glob == "*" and len(part.parts) == 1) for part in candidates)
        if matches:
            verdict = not keep
    return verdict


def image(name: str, code: Path) -> Image:
    """Return the content of the final stage of this name."""
    dockerfile = Dockerfile(ROOT / "Dockerfile")
    files: dict[str, Path] = {}
    packages: set[str] = set()
    for copy in dockerfile.copies(name):
        if copy.stage in _EXTRAS:
            packages = closure(requirements(ROOT / "pyproject.toml", _EXTRAS[copy.stage]))
            for package in packages:
                files |= {f"{SITE}/{place}": path for place, path in contents(package).items()}
            continue
        if copy.stage is None:
            files[copy.destination] = ROOT / copy.sources[0]
            continue
        assert copy.stage == "code", f"COPY --from={copy.stage} is not known here"
        for source in copy.sources:
            found = list(code.glob(source.removeprefix("/code/")))
            assert found, f"{source} is not in the wheel"
            files |= {str(PurePosixPath(SITE, copy.destination)): path for path in found}
    workdir = dockerfile.last(name, "WORKDIR").replace("python3.12", PYTHON)
    return Image(
        name=name,
        files=files,
        packages=packages,
        environment=dockerfile.environment(name),
        user=dockerfile.last(name, "USER"),
        workdir=workdir,
        entrypoint=dockerfile.entrypoint(name),
        health_check=dockerfile.health_check(name),
    )


def closure(lines: Iterable[str]) -> set[str]:
    """The requirements and all that they in turn require here, as pip would install them."""
    found: set[str] = set()
    waiting = [(requirement.name, frozenset(requirement.extras)) for requirement in map(Requirement, lines)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        found.add(name.lower().replace("_", "-"))
        for line in distribution(name).requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                waiting.append((needed.name, frozenset(needed.extras)))
    return found


@cache
def contents(name: str) -> dict[str, Path]:
    """The files and folders of a package: of a shared folder, like `google`, only its own part."""
    package = distribution(name)
    files = [
        PurePosixPath(file)
        for file in package.files or []
        if ".." not in file.parts and "__pycache__" not in file.parts
    ]
    with_files = {file.parent for file in files}
    tops = {
        next((parent for parent in reversed(file.parents) if parent in with_files and parent.parts), file)
        for file in files
    }
    return {str(top): Path(str(package.locate_file(top))) for top in tops}


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == keyword]


@dataclass(frozen=True, slots=True)
class Copy:
    """One COPY: from another stage, or from the build context where there is none."""

    stage: str | None
    sources: list[str]
    destination: str


class Dockerfile:
    def __init__(self, path: Path) -> None:
        self.stages: dict[str, Stage] = {}
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        stage = None
        for line in filter(None, (line.strip() for line in text.splitlines())):
            keyword, arguments = line.split(maxsplit=1)
            if keyword == "FROM":
                base, _, name = arguments.split()
                stage = self.stages[name] = Stage(name, base)
            elif stage is not None:
                stage.instructions.append((keyword, arguments))

    def chain(self, name: str) -> list[Stage]:
        """The stage and all that it is made from, the first first."""
        stage = self.stages.get(name)
        return [] if stage is None else [*self.chain(stage.base), stage]

    def base_images(self) -> set[str]:
        return {stage.base for stage in self.stages.values()} - self.stages.keys()

    def environment(self, name: str) -> dict[str, str]:
        values: dict[str, str] = {}
        for stage in self.chain(name):
            for arguments in stage.all("ENV"):
                values |= dict(word.split("=", 1) for word in shlex.split(arguments))
        return values

    def last(self, name: str, keyword: str) -> str:
        """Return the last instruction of this kind that applies to a stage."""
        return [arguments for stage in self.chain(name) for arguments in stage.all(keyword)][-1]

    def entrypoint(self, name: str) -> list[str]:
        return [str(word) for word in json.loads(self.last(name, "ENTRYPOINT"))]

    def health_check(self, name: str) -> list[str]:
        """The words that ask a container how it is; none for an image without a health check."""
        if not any(stage.all("HEALTHCHECK") for stage in self.chain(name)):
            return []
        return [str(word) for word in json.loads(self.last(name, "HEALTHCHECK").partition("CMD ")[2])]

    def copies(self, name: str) -> list[Copy]:
        """Every COPY on the way to a stage, in order."""
        return self.copies_of([arguments for stage in self.chain(name) for arguments in stage.all("COPY")])

    @staticmethod
    def copies_of(lines: Iterable[str]) -> list[Copy]:
        """Reads COPY lines."""
        found = []
        for line in lines:
            words = line.split()
            origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
            found.append(Copy(origin, words[:-1], words[-1]))
        return found

"""A Dockerfile as data: its stages, and what a container of one is started with."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


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
        found = []
        for stage in self.chain(name):
            for arguments in stage.all("COPY"):
                words = arguments.split()
                origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
                found.append(Copy(origin, words[:-1], words[-1]))
        return found

"""Named coordinators in the user's config file, one of them the current one; as kubectl has them.

current: staging
contexts:
  staging:
    address: staging.example.org:50051
    tls_ca_file: /etc/tandem/ca.pem
    token_file: /home/me/.tandem-token
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigurationError


@dataclass(slots=True)
class Contexts:
    """Content of the file."""

    path: Path
    current: str = ""
    """Name of the current context; empty: none."""
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, name: str) -> Mapping[str, Any]:
        """One of them.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ConfigurationError(f"there is no context {name!r}; {self.path} has: {known}")
        return self.by_name[name]

    def save(self) -> None:
        """Write the file, for its owner's eyes only: it may hold a token.

        Raises:
            ConfigurationError: it cannot be written.
        """
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


def contexts_path() -> Path:
    """Path of the file, by the XDG base directory specification."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "tandem" / "config.yaml"


def read_contexts() -> Contexts:
    """Content of the file; empty when there is none.

    Raises:
        ConfigurationError: it cannot be read, or holds something else.
    """
    path = contexts_path()
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

"""Build hook: generates the protobuf modules, so that `pip install` alone gives a package that imports."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtoBuildHook(BuildHookInterface[Any]):
    """Runs the generator before a wheel is packed or an editable install is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate `tandem/v1` and have it packed although git ignores it."""
        # Run by path: while a wheel is built, the source tree is not on the import path.
        generator = runpy.run_path(str(Path(self.root, "protos", "generate.py")))
        try:
            outputs = generator["generate"](Path(self.root))
        except generator["ProtoError"] as error:
            sys.exit(f"error: {error}")
        build_data["artifacts"].extend(f"/{output.relative_to(self.root).as_posix()}" for output in outputs)

"""Build hook: makes the protobuf modules and the kernels, and adds the bundled models."""

from __future__ import annotations

import os
import platform
import re
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

DEMO_PACKAGE = "tandem_demo"
"""The bundled models' folder in a wheel: beside `tandem`, where `tandem.model_sources.bundled` looks for it."""

KERNEL_LIBRARY = Path("tandem", "engine", "backends", "cpu_native", "library")

KERNELS_VARIABLE = "TANDEM_WHEEL_KERNELS"
"""Names, with commas between them, of the processors whose kernels a wheel is to hold (`TARGETS` of the kernels'
build.py); empty for none. By default all of them on Linux and x86-64, and the build goes on without those that cannot
be compiled."""


URL_VARIABLE = "TANDEM_WHEEL_URL"
"""Address of the repository that a wheel is published from, as https://host/owner/name: links of the README lead there,
and METADATA names it. By default there is none, and the README of a wheel has the links' words alone."""


class MetadataHook(MetadataHookInterface):
    """Writes what METADATA says about the project."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README, with links that work on a package index, and the project's addresses."""
        url = os.environ.get(URL_VARIABLE, "").rstrip("/")
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": published(readme, url)}
        places = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
        metadata["urls"] = {name: url + place for name, place in places.items()} if url else {}


def published(readme: str, url: str) -> str:
    """The README with absolute links, or without a URL with their words in place of relative ones."""
    return re.sub(
        r"\[([^\]]+)\]\((?!https?:)([^)]+)\)",
        lambda link: f"[{link[1]}]({url}/blob/main/{link[2]})" if url else link[1],
        readme,
    )


class BuildHook(BuildHookInterface[Any]):
    """Runs before a wheel is packed or an editable install is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the protobuf modules, and add the models and compiled kernels to a wheel."""
        root = Path(self.root)
        # Run by path: while a wheel is built, the source tree is not on the import path.
        generator = runpy.run_path(str(root / "protos" / "generate.py"))
        try:
            generator["generate"](root)
        except generator["ProtoError"] as error:
            sys.exit(f"error: {error}")
        if version != "editable":
            build_data["force_include"].update(_bundled_models(root))
            build_data["force_include"].update(_compiled_kernels(root, self.app.display_warning))


def _bundled_models(root: Path) -> dict[str, str]:
    """The model folders, each with its place in the wheel; none in an image's build, which has no `models/`."""
    models = root / "models"
    places = {models / "demo" / name: name for name in ("target", "draft", "eagle3", "medusa")}
    places[models / "smollm2" / "eagle3"] = "smollm2/eagle3"
    return {str(folder): f"{DEMO_PACKAGE}/{place}" for folder, place in places.items() if folder.is_dir()}


def _compiled_kernels(root: Path, warn: Callable[[str], None]) -> dict[str, str]:
    """The kernels for each processor, with their places in the wheel. They are optional: an installation without them
    compiles its own where it has a compiler. The wheel therefore stays one for every platform."""
    # Run by path, as the protobuf generator is.
    builder = runpy.run_path(str(root / KERNEL_LIBRARY / "build.py"))
    targets = list(builder["TARGETS"])
    named = os.environ.get(KERNELS_VARIABLE)
    if named is None:
        wanted = targets if (sys.platform, platform.machine()) == ("linux", "x86_64") else []
    else:
        wanted = [name for name in named.split(",") if name]
    if unknown := [name for name in wanted if name not in targets]:
        sys.exit(f"error: {KERNELS_VARIABLE} names {', '.join(unknown)}; it may name {', '.join(targets)}")

    def compiled(target: str) -> Path | None:
        try:
            library: Path = builder["built_kernels"](target=target)
        except builder["BuildError"] as error:
            if named is not None:
                sys.exit(f"error: no kernels for {target}: {error}")
            warn(f"the wheel holds no kernels for {target}: {error}")
            return None
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = dict(zip(wanted, pool.map(compiled, wanted), strict=True))
    return {
        str(path): str(KERNEL_LIBRARY / "objects" / f"{name}.so") for name, path in libraries.items() if path
    }

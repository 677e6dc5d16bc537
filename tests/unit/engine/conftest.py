from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.backends.cpu_native.library.build import BuildError, built_kernels
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.cpu_native.plans import Trace
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.models.loading import LoadedModel, load_model
from tests.paths import DEVICE
from tests.unit.engine.tiny_models import CONFIGS, hf, save_checkpoint

COMPILE_MODE = "on" if DEVICE == "cpu" and shutil.which("c++") else "off"
"""Where there is a compiler, kernels that fail their trial fail the tests: users would be served by torch instead."""


@dataclass(frozen=True)
class TinyModel:
    """The same weights twice: as the engine runs them, and as transformers does."""

    folder: Path
    reference: Any
    backends: Backends
    """Its steps run by the model's own modules, with the kernels in them."""

    @property
    def loaded(self) -> LoadedModel:
        """As the engine loads it."""
        return self.backends.model

    @property
    def with_plans(self) -> Backends:
        """Its steps replayed from execution plans."""
        native = self.backends.native
        if native is None:
            pytest.skip("there are no kernels: no C++ compiler, or another device")
        return replace(self.backends, native=replace(native, trace=partial(Trace, self.loaded.module)))


MakeModel = Callable[[str], TinyModel]
"""Makes the model of a family, once."""


def saved_model(folder: Path, config: Any) -> TinyModel:
    """A model of this configuration, written to the folder."""
    reference = save_checkpoint(folder, config)
    backends = choose_backends(load_model(folder, device=DEVICE, dtype="float32"), compile_mode=COMPILE_MODE)
    native = backends.native and replace(backends.native, trace=None)
    return TinyModel(folder, reference, replace(backends, native=native))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    hf.utils.logging.disable_progress_bar()
    with torch_threads(1):  # models this small only lose by more
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes a model of a family, once in a session."""
    return cache(lambda family: saved_model(tmp_path_factory.mktemp(family), CONFIGS[family]()))


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    try:
        return Kernels(built_kernels())
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def llama(tiny_model: MakeModel) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def mistral(tiny_model: MakeModel) -> TinyModel:
    """Its window is shorter than most texts here."""
    return tiny_model("mistral")

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.model import LoadedModel, load_model
from tandem.engine.native.trace import Trace
from tests.unit.engine.tiny_models import CONFIGS, hf, save_checkpoint


@dataclass(frozen=True)
class TinyModel:
    """The same weights twice: as the engine runs them, and as transformers does."""

    folder: Path
    reference: Any
    loaded: LoadedModel
    """Its steps run by the model's own modules: to trace each of many models takes long."""
    trace: Trace | None = None

    @property
    def with_tapes(self) -> LoadedModel:
        """The same, its steps played from tapes."""
        if self.loaded.kernels is None:
            pytest.skip("there is no C++ compiler")
        return replace(self.loaded, trace=self.trace)


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by more
    hf.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes a model of a family, once in a session."""
    made: dict[str, TinyModel] = {}

    def make(family: str) -> TinyModel:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            reference = save_checkpoint(folder, CONFIGS[family]())
            loaded = replace(load_model(folder, dtype="float32"), trace=None)
            made[family] = TinyModel(folder, reference, loaded, Trace(loaded.module))
        return made[family]

    return make


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def mistral(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    """Its window is shorter than most texts here."""
    return tiny_model("mistral")

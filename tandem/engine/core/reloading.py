"""A model whose weights can be replaced and freed: it is loaded beside the present one, and an engine is made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch

from tandem.config.settings import ModelServerSettings
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.interface import free_unused
from tandem.engine.models.checkpoint import check_unchanged
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ModelFolderError, ServiceUnavailableError
from tandem.model.types import ModelInfo, Weights

EngineT = TypeVar("EngineT")

_SAME = ("architecture", "vocabulary_size", "tokenizer_hash", "trained_length", "rope", "parameter_count")
"""Fields of `ModelInfo` in which new weights must equal the present ones."""


_CONTINUED = 16
"""Earlier weights whose sequences may go on, the latest: a request lives for few loads."""


@dataclass(frozen=True, slots=True)
class EmbeddedCandidate:
    """Weights that were read and checked and do not serve yet."""

    backends: Backends
    folder: Path


class EmbeddedModel(Generic[EngineT]):
    """See `ReloadableModel`; for the embedded engine."""

    def __init__(
        self, settings: ModelServerSettings, folder: Path, make_engine: Callable[[Backends], EngineT]
    ) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._folder = folder
        backends = self._choose(self._load(folder))
        self._backends: Backends | None = backends
        """None while it sleeps without its weights."""
        self.info = backends.info
        self._shapes = backends.model.shapes
        self._stored_names = backends.model.stored_names

    @property
    def backends(self) -> Backends:
        if self._backends is None:
            raise ServiceUnavailableError("the weights are not in memory")
        return self._backends

    def make_engine(self) -> EngineT:
        return self._make_engine(self.backends)

    def load(self, folder: Path, version: int, *, continues: bool) -> EmbeddedCandidate:
        loaded = self._load(folder)
        self._check_alike(loaded, folder)
        found = loaded.info.weights
        present = self.info.weights
        assert found is not None
        assert present is not None
        before = (present.fingerprint, *present.continued_fingerprints)[:_CONTINUED] if continues else ()
        weights = Weights(version, found.fingerprint, before)
        model = replace(loaded, info=replace(self.info, weights=weights))
        return EmbeddedCandidate(self._choose(model), folder)

    def take(self, candidate: EmbeddedCandidate) -> Callable[[], None]:
        before = (self._backends, self._folder, self.info)

        def put_back() -> None:
            self._backends, self._folder, self.info = before

        self._backends = candidate.backends
        self._folder = candidate.folder
        self.info = candidate.backends.info
        return put_back

    def free(self, level: int) -> None:
        if level == 1:
            self.backends.model.module.to("cpu")
        else:
            self._backends = None
        free_unused()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        if self._backends is not None:
            self._backends.model.module.to(self._backends.device)
            return
        loaded = self._load(self._folder)
        found = loaded.info.weights
        present = self.info.weights
        assert found is not None
        assert present is not None
        check_unchanged(self._folder, found.fingerprint, present.fingerprint)
        self._backends = self._choose(replace(loaded, info=self.info))

    def _load(self, folder: Path) -> LoadedModel:
        settings = self._settings
        return load_model(
            folder, device=settings.compute_device, dtype=settings.compute_dtype, threads=settings.threads
        )

    def _choose(self, model: LoadedModel) -> Backends:
        return choose_backends(model, self._settings.compile, self._settings.compile_cache)

    def _check_alike(self, loaded: LoadedModel, folder: Path) -> None:
        """Refuse weights of another model than the present one."""
        for name in _SAME:
            own = _show(loaded.info, name)
            present = _show(self.info, name)
            if own != present:
                raise ModelFolderError(
                    f"the model in {folder} has {name} {own} and the one that serves has {present}; new weights must "
                    "be of the same model"
                )
        wrong = [name for name, shape in self._shapes.items() if loaded.shapes.get(name) != shape]
        if wrong:
            raise ModelFolderError(
                f"the tensor {wrong[0]} in {folder} has the shape {list(loaded.shapes.get(wrong[0], ()))} and the one "
                f"that serves has {list(self._shapes[wrong[0]])}; new weights must be of the same model"
            )
        additional = sorted(loaded.stored_names - self._stored_names - self._shapes.keys())
        if additional:
            raise ModelFolderError(
                f"the weights in {folder} have tensors that the model which serves does not have: {additional[0]}"
                + (f" and {len(additional) - 1} more" if len(additional) > 1 else "")
            )


def _show(info: ModelInfo, name: str) -> str:
    value = str(getattr(info, name))
    return value[:12] if name == "tokenizer_hash" else value or "none"

"""A model over vLLM whose weights can be replaced and freed: vLLM is started anew in the same service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import safe_open

from tandem.engine.interface import free_unused
from tandem.engine.models.checkpoint import (
    Checkpoint,
    check_unchanged,
    first_of,
    open_checkpoint,
    tokenizer_hash,
    weights_fingerprint,
)
from tandem.engine_vllm.engine import VllmModel
from tandem.errors import ModelFolderError
from tandem.model.types import Weights

EngineT = TypeVar("EngineT")

_CONTINUED = 16
"""Earlier weights whose sequences may go on, the latest: a request lives for few loads."""
_SAME_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
"""Keys of config.json that decide a model's text beside its tensors."""


@dataclass(frozen=True, slots=True)
class VllmCandidate:
    """A folder of weights that were checked and do not serve yet."""

    folder: Path
    weights: Weights


class VllmWeights(Generic[EngineT]):
    """See `ReloadableModel`. An engine ends its vLLM with itself, and the next one starts another."""

    def __init__(
        self, folder: Path, load: Callable[[Path], VllmModel], make_engine: Callable[[VllmModel], EngineT]
    ) -> None:
        self._folder = folder
        self._checkpoint = open_checkpoint(folder)
        self._load = load
        self._make_engine = make_engine
        first = load(folder)
        fingerprint = weights_fingerprint(folder, self._checkpoint.weights)
        self.info = replace(first.info, weights=Weights(1, fingerprint))
        self._loaded: VllmModel | None = first
        """Taken by the next engine; None where that starts vLLM."""

    def make_engine(self) -> EngineT:
        model = self._loaded or self._load(self._folder)
        self._loaded = None
        model.info = self.info
        return self._make_engine(model)

    def load(self, folder: Path, version: int, *, continues: bool) -> VllmCandidate:
        found = open_checkpoint(folder)
        self._check_alike(found)
        _check_finite(found)
        present = self.info.weights
        assert present is not None
        before = (present.fingerprint, *present.continued_fingerprints)[:_CONTINUED] if continues else ()
        return VllmCandidate(folder, Weights(version, weights_fingerprint(folder, found.weights), before))

    def take(self, candidate: VllmCandidate) -> Callable[[], None]:
        folder = self._folder
        info = self.info

        def put_back() -> None:
            self._folder = folder
            self.info = info

        self._folder = candidate.folder
        self.info = replace(info, weights=candidate.weights)
        return put_back

    def free(self, level: int) -> None:
        """On both levels: vLLM has ended with its engine, and the weights are read again from their folder."""
        free_unused()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        found = weights_fingerprint(self._folder, open_checkpoint(self._folder).weights)
        present = self.info.weights
        assert present is not None
        check_unchanged(self._folder, found, present.fingerprint)
        self._loaded = self._load(self._folder)

    def _check_alike(self, found: Checkpoint) -> None:
        """Refuse weights of another model than the present one."""
        present = self._checkpoint
        if found.architecture != present.architecture:
            raise _other_model(found, "architecture", found.architecture, present.architecture)
        for key in _SAME_KEYS:
            if found.config.get(key) != present.config.get(key):
                raise _other_model(found, key, found.config.get(key), present.config.get(key))
        found_hash = tokenizer_hash(found.folder)[:12]
        if found_hash != self.info.tokenizer_hash[:12]:
            raise _other_model(found, "tokenizer_hash", found_hash, self.info.tokenizer_hash[:12])
        shapes = found.weights.shapes
        for name, shape in present.weights.shapes.items():
            if name not in shapes:
                raise ModelFolderError(f"the weights in {found.folder} lack the tensor {name}")
            if shapes[name] != shape:
                raise _other_model(found, f"the tensor {name} of the shape", list(shapes[name]), list(shape))
        additional = sorted(shapes.keys() - present.weights.shapes.keys())
        if additional:
            raise ModelFolderError(
                f"the weights in {found.folder} have tensors that the model which serves does not have: "
                f"{first_of(additional)}"
            )


def _other_model(found: Checkpoint, what: str, own: object, present: object) -> ModelFolderError:
    return ModelFolderError(
        f"the model in {found.folder} has {what} {own} and the one that serves has {present}; new weights must be of "
        "the same model"
    )


def _check_finite(found: Checkpoint) -> None:
    """Refuse weights that hold NaN or infinity, before vLLM reads them."""
    for path in found.weights.files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                # torch cannot test numbers of 8 bits
                if tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.isfinite().all():
                    raise ModelFolderError(f"the weights in {found.folder} hold NaN or infinity: {name}")

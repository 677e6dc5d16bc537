"""Writes the hidden states of finished requests, to train drafting heads from (vLLM's `extract_hidden_states`)."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Semaphore
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from tandem.engine.hidden_states import HiddenStateTap, LayerStates
from tandem.engine.interface import RowRequest, SequenceEngine
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.models.heads.interface import text_config
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ConfigurationError, TandemError
from tandem.model.types import Delta, RowKind, TargetOptions, VerifyStep
from tandem_target.settings import TargetSettings

logger = logging.getLogger(__name__)

_MOST_WAITING = 64
"""Files that wait for the disk; a request that ends meanwhile loses its own."""


def hidden_state_files(settings: TargetSettings, model: LoadedModel) -> HiddenStateFiles | None:
    """The files that the settings ask for; None if they ask for none."""
    if settings.shared_storage_path is None:
        return None
    folder = settings.shared_storage_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--shared-storage-path is {folder}, which cannot be written to: {error.strerror}"
        ) from error
    count: int = text_config(model).num_hidden_layers
    given = settings.eagle_aux_hidden_state_layer_ids
    ids = given or (2, count // 2, count - 3)  # EAGLE-3's
    if not all(0 <= each <= count for each in ids):
        origin = "" if given else ", by default"
        raise ConfigurationError(
            f"--eagle-aux-hidden-state-layer-ids is {list(ids)}{origin}; {model.info.name} has {count} layers, so each "
            f"must be from 0 to {count}"
        )
    return HiddenStateFiles(folder, model, ids)


class HiddenStateFiles:
    """One file for each finished request: `token_ids`, int64 [tokens], and `hidden_states`, [tokens, layers, hidden
    size] in the model's dtype.

    A state is the residual stream after that many layers, so it is not normalized by the model's last norm.
    """

    def __init__(self, folder: Path, model: LoadedModel, layer_ids: SequenceOf[int]) -> None:
        """`layer_ids` are residual streams by the number of layers before them."""
        self._folder = folder
        self._layer_count = len(layer_ids)
        self._writer = ThreadPoolExecutor(1, "hidden-states")
        self._room = Semaphore(_MOST_WAITING)
        self.tap = HiddenStateTap(model, LayerStates(layer_ids, model))

    async def take(
        self, engine: SequenceEngine[Sequence], sequence: Sequence, count: int, options: TargetOptions
    ) -> None:
        """Write the states of a sequence's first tokens, computed again if its pages were given to another one.

        The file is written in the background, whole or not at all. A failure is logged, never raised.
        """
        count = min(count, sequence.length)
        request_id = options.request_id
        if count == 0:
            return
        token_ids = torch.tensor(sequence.token_ids[:count], dtype=torch.int64)
        states = await self._read(sequence, count)
        if states is None:
            try:
                step = VerifyStep(Delta(count, ()), RowKind.TOKEN, 0)
                await engine.run(sequence, RowRequest(step, options))
            except TandemError as error:
                _report_lost(request_id, str(error))
                return
            states = await self._read(sequence, count)
        if states is None:
            _report_lost(request_id, "the KV cache is full")
        elif not self._room.acquire(blocking=False):
            _report_lost(request_id, f"{_MOST_WAITING} files wait for the disk")
        else:
            self._writer.submit(self._write, request_id, {"token_ids": token_ids, "hidden_states": states})

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.shutdown)

    async def _read(self, sequence: Sequence, count: int) -> Tensor | None:
        [found] = await asyncio.to_thread(self.tap.read, [(sequence, 0, count)])
        return None if found is None else found.view(count, self._layer_count, -1)

    def _write(self, request_id: str, tensors: dict[str, Tensor]) -> None:
        # A name from outside; a slash in it must not lead out of the folder.
        path = self._folder / f"{quote(request_id, safe='')}.safetensors"
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            # Not by save_file, which lets nobody else read the file.
            part.write_bytes(save({name: each.cpu().contiguous() for name, each in tensors.items()}))
            part.replace(path)
        except (OSError, SafetensorError) as error:
            _report_lost(request_id, str(error))
            with suppress(OSError):
                part.unlink(missing_ok=True)
        finally:
            self._room.release()


def _report_lost(request_id: str, reason: str) -> None:
    logger.warning("hidden states are lost", extra={"request_id": request_id, "reason": reason})

"""The memory profiling run at real sizes: what the largest step holds at once, counted on the fake device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.engine.backends.cuda_graphs.buckets import make_buckets
from tandem.engine.backends.memory_profile import plan_memory
from tandem.engine.settings import EngineSettings
from tests.unit.engine.fake_cuda.models import MAX_LENGTH, make_model

GB = 10**9
SETTINGS = EngineSettings(max_sequences=32, prefill_chunk_tokens=2048, captured_widths=(1, 3, 5, 9))


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts the bytes of the device's tensors that are alive: an allocator without rounding. See `MemoryMeter`."""

    def __init__(self, allowed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed = allowed
        self._live = self._peak = 0
        self._known: set[int] = set()

    def allowance(self, share: float | None) -> int:
        """See `MemoryMeter`."""
        return self.allowed

    def begin(self) -> None:
        """See `MemoryMeter`."""
        self._peak = self._live

    def held_bytes(self) -> int:
        """See `MemoryMeter`."""
        return self._live

    def peak_bytes(self) -> int:
        """See `MemoryMeter`."""
        return self._peak

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation and counts the memory that is new with it."""
        result = func(*args, **dict(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def test_the_largest_step_of_llama_8b(fake_cuda: None) -> None:
    """2.2 GB, most of it for the distributions of 288 rows in float64, warped and sorted; graphs read fewer tokens."""
    model = make_model("Llama-3.1-8B")
    with LiveMemory(60 * GB) as meter:
        plan = plan_memory(model, SETTINGS, MAX_LENGTH, make_buckets(32, SETTINGS.captured_widths), meter)
    assert plan.graph_bytes is not None
    assert plan.settings.kv_cache_bytes is not None
    activations = 60 * GB - plan.settings.kv_cache_bytes - plan.graph_bytes
    distributions = 32 * 9 * model.info.vocabulary_size * 8
    assert 5 * distributions < activations < 9 * distributions
    logits = 32 * 9 * model.info.vocabulary_size * 2
    assert logits < plan.graph_bytes - 16 * 16 * 2**20 < 2 * logits

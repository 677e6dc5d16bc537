"""Limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.errors import ConfigurationError
from tandem.fair_places import extra_places

if TYPE_CHECKING:
    from tandem.settings import ModelServerSettings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of one engine. Every field has a default that suits one model on one device."""

    max_length: int | None = None
    """Longest sequence, in tokens. None takes the model's own limit."""
    max_sequences: int = 64
    """Maximum sequences open at once, and in one forward pass."""
    kept_sequences: int = 0
    """Sequences among them that are kept for clients with few open."""
    max_waiting: int = 256
    """Requests that may wait for room before more are refused."""
    prefill_chunk_tokens: int = 512
    """Maximum prompt tokens in one step, so that a long prompt delays running sequences by one chunk at most."""
    kv_cache_bytes: int | None = None
    """Maximum size of the KV cache. None derives it from `device_memory_utilization`."""
    device_memory_utilization: float | None = None
    """Share of the device's memory that weights and KV cache of this process may fill together, whatever others take.
    None is 0.9 on an accelerator and 0.3 on a CPU, whose memory is shared with everything else. The cache never takes
    more than `max_sequences` could use."""
    prefix_reuse: bool = True
    """A new sequence reuses the KV of a prefix that another sequence, open or lately released, has computed."""

    step_timeout_seconds: float | None = None
    """How long a step may take before it counts as stuck. None learns it, see `tandem.engine.core.timing`."""

    @classmethod
    def of(cls, settings: ModelServerSettings) -> EngineSettings:
        """The limits that a service's options ask for on its device."""
        chunk = settings.max_num_batched_tokens
        if chunk is None:
            # On an accelerator vLLM's own default for serving, enough to keep it busy.
            chunk = 512 if settings.compute_device == "cpu" else 2048
        return cls(
            max_length=settings.max_length,
            max_sequences=settings.max_sequences + extra_places(settings.max_sequences),
            kept_sequences=extra_places(settings.max_sequences),
            prefill_chunk_tokens=chunk,
            kv_cache_bytes=settings.kv_cache_memory_bytes,
            device_memory_utilization=settings.device_memory_utilization,
            prefix_reuse=settings.enable_prefix_caching,
            step_timeout_seconds=settings.step_timeout_seconds,
        )

    def longest_sequence(self, model_name: str, model_length: int) -> int:
        """The longest sequence of a model that was made for `model_length` tokens.

        Raises:
            ConfigurationError: `max_length` is more than that.
        """
        if self.max_length is None:
            return model_length
        if self.max_length > model_length:
            raise ConfigurationError(
                f"max_length is {self.max_length}, but the model {model_name} was made for at most {model_length} "
                "tokens."
            )
        return self.max_length

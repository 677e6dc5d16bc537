"""The one class of options for speculative decoding."""

from __future__ import annotations

from typing import Any

from tandem.config.acceptance import AcceptanceOptions
from tandem.config.drafting import DraftingOptions
from tandem.config.rule import Rule, always, at_least, within
from tandem.config.source_options import SourceOptions


class SpeculativeConfig(DraftingOptions, AcceptanceOptions, SourceOptions):
    """Speculative decoding, in the words of MAX's and vLLM's `SpeculativeConfig`.

    Made in Python, also from a file (`SpeculativeConfig(config_file=...)`); a process fills it from its command line,
    the environment and a file (`tandem.config.layers`). vLLM's spellings are accepted; what this version does not have
    is refused by name.

    Raises:
        ValidationError: with a sentence for everything that is wrong.
    """

    max_length: int | None = None
    """Maximum tokens of a sequence, prompt and completion together; the same for draft and target. By default the
    models' own. MAX's name; vLLM: max_model_len."""
    device_memory_utilization: float | None = None
    """Share of a device's memory that one service may take, model and KV cache together. By default 0.9 on a GPU and
    0.3 on a CPU. Draft and target on one device need shares that are at most 1 together. MAX's name."""
    draft_tensor_parallel_size: int | None = None
    """Number of devices for the draft model: 1 or the target's. By default 1. vLLM's name."""
    max_num_steps: int = 1
    """Steps of the target per scheduling step; it must be 1. MAX's name."""
    enable_echo: bool = False
    """Begin the completion with the prompt. MAX's name."""
    enable_structured_output: bool = False
    """Bind completions to a grammar or schema. MAX's name."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the configuration alone."""
        return (*super().rules(), *SPECULATIVE_RULES)


SPECULATIVE_RULES: tuple[Rule[SpeculativeConfig], ...] = (
    at_least("max_length", 1),
    within("device_memory_utilization", 5e-324, 1.0, "above 0 and at most 1"),
    at_least("draft_tensor_parallel_size", 1),
    always(
        "max_num_steps", 1, "each step of the target verifies a proposal, and its result decides on the next"
    ),
    always(
        "enable_echo",
        False,
        "the prompt is not streamed back; put it before the completion",
    ),
    always(
        "enable_structured_output",
        False,
        "the draft would have to keep to the same grammar; check the completion after it ends",
    ),
)
"""Rules beside those of the drafting method and of the acceptance rule."""

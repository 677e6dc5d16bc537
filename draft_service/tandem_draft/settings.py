"""The draft service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from tandem.config.names import STANDALONE, as_torch
from tandem.config.options import SHORT_HELP
from tandem.config.settings import ModelServerSettings
from tandem.config.speculative import DraftingOptions, SourceOptions
from tandem.errors import ConfigurationError


class DraftSettings(DraftingOptions, SourceOptions, ModelServerSettings):
    """Serve proposals: a draft model's, or what was said before."""

    env_prefix: ClassVar = "TANDEM_DRAFT_"

    port: Annotated[int, SHORT_HELP] = Field(default=50053, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    model: Annotated[Path | None, SHORT_HELP] = None  # type: ignore[assignment]
    """Folder of the draft model's checkpoint, for standalone: config.json, safetensors and tokenizer.json; or a Hugging
    Face id."""
    draft_top_k: int = Field(default=512, ge=1)
    """Maximum number of most probable tokens that the draft samples from when it sends its distribution."""
    draft_support_mass: float = Field(default=0.97, gt=0.0, le=1.0)
    """The draft samples from the fewest of the draft_top_k tokens that hold this share of their probability."""

    target_features: bool = False
    """The model is an EAGLE-3 head that reads hidden states of the target's, brought by coordinators. Tandem's own."""
    target_model: Path | None = None
    """Folder of the target, for the embedding that the head shares with it. Tandem's own."""
    draft_feature_window: int | None = Field(default=None, ge=0)
    """How many of a prompt's last tokens the head reads hidden states of, besides the last one. By default of all.
    Tandem's own."""

    draft_shared_passes: bool = False
    """The head's branches go on beside its proposals, as if they shared a pass. Of the trial."""

    @property
    def method(self) -> str:
        """Drafting method; standalone unless the options say otherwise."""
        return self.speculative_method or STANDALONE

    @property
    def compute_device(self) -> str:
        """Device of the draft model, as torch names it. `draft_devices` is MAX's name for it, and may be shared."""
        return self.device if self.draft_devices is None else as_torch(self.draft_devices)

    @property
    def device_count(self) -> int:
        """Devices that it is split over. `draft_tensor_parallel_size` is vLLM's name for it, and may be shared."""
        return self.draft_tensor_parallel_size or self.tensor_parallel_size

    @property
    def checkpoint(self) -> Path:
        if self.model is not None:
            return self.model
        if self.draft_model_path is not None:
            return Path(self.draft_model_path)
        raise ConfigurationError(
            "--model is missing; give it, or set TANDEM_DRAFT_MODEL; "
            "--method ngram and --method suffix need none"
        )

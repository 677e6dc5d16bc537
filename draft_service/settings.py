"""The draft service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from draft_service.proposers.ngram import LookupMatch, NgramOptions
from draft_service.proposers.suffix import SuffixOptions
from tandem.errors import ConfigurationError
from tandem.settings import COMMAND_LINE, ModelServerSettings

DEFAULT_PORT = 50053

DraftMethod = Literal["standalone", "ngram", "suffix"]

_SUFFIX = SuffixOptions()


class DraftSettings(ModelServerSettings):
    """Serve proposals: a draft model's, or what was said before."""

    model_config = SettingsConfigDict(**COMMAND_LINE, env_prefix="TANDEM_DRAFT_")

    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    method: DraftMethod = "standalone"
    """How to draft: with a model of its own, by prompt lookup, or by suffix decoding. The last two need no model."""
    model: Path | None = None  # type: ignore[assignment]
    """Folder of the draft model's checkpoint, for standalone: config.json, safetensors and tokenizer.json."""
    draft_top_k: int = Field(default=64, ge=1)
    """How many of its most probable tokens the draft chooses among when its distribution travels with them."""
    prompt_lookup_min: int | None = None
    """For ngram: smallest n-gram to look up. By default prompt_lookup_max; 5 when neither is given."""
    prompt_lookup_max: int | None = None
    """For ngram: largest n-gram to look up. By default prompt_lookup_min; 5 when neither is given."""
    prompt_lookup_match: LookupMatch = "latest"
    """For ngram: which of several earlier occurrences counts."""
    suffix_decoding_max_tree_depth: int = _SUFFIX.suffix_decoding_max_tree_depth
    """For suffix: most tokens of a match and its continuation together."""
    suffix_decoding_max_cached_requests: int = _SUFFIX.suffix_decoding_max_cached_requests
    """For suffix: how many finished responses are learnt from, the oldest forgotten first; 0 keeps none."""
    suffix_decoding_max_spec_factor: float = _SUFFIX.suffix_decoding_max_spec_factor
    """For suffix: most tokens to propose, as a multiple of the length of the match."""
    suffix_decoding_min_token_prob: float = _SUFFIX.suffix_decoding_min_token_prob
    """For suffix: least estimated probability of a proposed token, given the match."""

    @property
    def checkpoint(self) -> Path:
        """Folder of the draft model's checkpoint.

        Raises:
            ConfigurationError: none was given.
        """
        if self.model is None:
            raise ConfigurationError("--model is missing; give it, or set TANDEM_DRAFT_MODEL")
        return self.model

    @property
    def ngram_options(self) -> NgramOptions:
        """The options of prompt lookup.

        Raises:
            ConfigurationError: with a sentence for each that is wrong.
        """
        return NgramOptions.resolve(self.prompt_lookup_min, self.prompt_lookup_max, self.prompt_lookup_match)

    @property
    def suffix_options(self) -> SuffixOptions:
        """The options of suffix decoding.

        Raises:
            ConfigurationError: with a sentence for each that is wrong.
        """
        return SuffixOptions(
            self.suffix_decoding_max_tree_depth,
            self.suffix_decoding_max_cached_requests,
            self.suffix_decoding_max_spec_factor,
            self.suffix_decoding_min_token_prob,
        )

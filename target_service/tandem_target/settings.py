"""The target service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.config.names import BOUND_METHODS, OWN_METHODS, canonical_method
from tandem.config.options import SHORT_HELP
from tandem.config.origin import Origin
from tandem.config.settings import ModelServerSettings
from tandem.config.speculative import MAX_CONFIGURED_TOKENS, PROPOSED_TOKENS, Integers
from tandem.errors import ConfigurationError

EXTRACT_HIDDEN_STATES = "extract_hidden_states"
"""vLLM's name of the method that writes hidden states and proposes nothing."""


class TargetSettings(ModelServerSettings):
    """Serve a target model."""

    env_prefix: ClassVar = "TANDEM_TARGET_"

    port: Annotated[int, SHORT_HELP] = Field(default=50052, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    draft_model: Annotated[Path | None, SHORT_HELP] = None
    """Folder of a drafting head for this model, which then proposes in this process, on the same port. By default none.
    vLLM's name for it: model of --speculative-config."""
    speculative_method: Annotated[str | None, SHORT_HELP] = None
    """Method of draft_model: eagle, eagle3, medusa or dflash. By default what its config.json says. mtp drafts with the
    model's own layers for multi-token prediction, and needs no draft_model. extract_hidden_states, which needs no
    draft, is implied by shared_storage_path. vLLM's name: method."""
    draft_repeats: bool = True
    """Where the text repeats itself, propose the tokens that followed before instead of the head's own, while as many
    of them are accepted. Only at temperature 0 and under the rule strict, and not with heads of vLLM's."""
    shared_storage_path: Path | None = None
    """Folder to which the hidden states of each finished request are written, in a safetensors file, to train drafting
    heads from. By default none. vLLM's name, in kv_connector_extra_config."""
    eagle_aux_hidden_state_layer_ids: Integers | None = None
    """Layers whose hidden states are written, each by the number of layers before the state: 0 is the embedding. By
    default EAGLE-3's three. vLLM's name, in the draft's hf_config."""
    features: Literal["eagle3"] | None = None
    """Send coordinators what a drafting head on another device reads. Tandem's own."""
    head: Path | None = None
    """Folder of that head, whose first projection this process applies. Tandem's own."""
    num_speculative_tokens: int = Field(default=PROPOSED_TOKENS, ge=1, le=MAX_CONFIGURED_TOKENS)
    """Tokens of the proposals for which the engine vllm captures whole CUDA graphs: the coordinator's number. Others
    run as well, and heads of vLLM's propose no more. vLLM's name."""

    @property
    def has_head(self) -> bool:
        """True if the target drafts by itself."""
        return self.draft_model is not None or canonical_method(self.speculative_method or "") in OWN_METHODS

    @property
    def needs_hidden_states(self) -> str:
        return "" if self.shared_storage_path is None else "shared_storage_path"


def check_extraction(settings: TargetSettings) -> None:
    """Refuse a method that a target has no use for, and options of `extract_hidden_states` that do not go together."""
    method = settings.speculative_method
    folder = settings.shared_storage_path
    if (settings.features is None) != (settings.head is None):
        raise ConfigurationError(
            f"--features is {settings.features} and --head is {settings.head}; give both, or none"
        )
    if settings.features is not None and (folder is not None or settings.has_head or settings.uses_vllm):
        raise ConfigurationError(
            f"--features is {settings.features}; it goes with the embedded engine, and with neither --draft-model nor "
            "--shared-storage-path"
        )
    if folder is None and method == EXTRACT_HIDDEN_STATES:
        raise ConfigurationError(
            f"--method is {method} and --shared-storage-path is missing; name the folder for the files"
        )
    if folder is None and settings.eagle_aux_hidden_state_layer_ids is not None:
        raise ConfigurationError(
            f"--eagle-aux-hidden-state-layer-ids is {list(settings.eagle_aux_hidden_state_layer_ids)} and "
            "--shared-storage-path is missing; name the folder for the files, or leave out the layers"
        )
    if folder is not None and (
        settings.draft_model is not None or method not in (None, EXTRACT_HIDDEN_STATES)
    ):
        draft = settings.draft_model or f"--method {method}"
        raise ConfigurationError(
            f"--shared-storage-path is {folder} beside the draft {draft}; a target writes hidden states or hosts a "
            "draft, so leave out one of them"
        )
    # Of the environment and files, which all processes share, a method concerns the draft.
    is_own = settings.origins.get("speculative_method", Origin.COMMAND_LINE) is Origin.COMMAND_LINE
    hosted = ("", EXTRACT_HIDDEN_STATES, *OWN_METHODS)
    if is_own and settings.draft_model is None and canonical_method(method or "") not in hosted:
        raise ConfigurationError(
            f"--method is {method}, and the target has no --draft-model; a target hosts only heads: start the draft as "
            f"a service of its own, with tandem serve draft --method {method}"
            if canonical_method(str(method)) not in BOUND_METHODS
            else f"--method is {method} and --draft-model is missing; name the folder of the head"
        )

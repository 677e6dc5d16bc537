"""Options of the acceptance rules, from the configuration and the request."""

from __future__ import annotations

from coordinator.rejection.strategies import SYNTHETIC_OPTIONS
from tandem.config import SpeculativeConfig
from tandem.config.names import AUTO, canonical_name
from tandem.types import GenerationRequest, ModelInfo


def names_auto(config: SpeculativeConfig, request: GenerationRequest | None = None) -> bool:
    """True if measurements should pick the rule."""
    named = None if request is None else request.rejection_sampling_strategy
    return canonical_name(named or config.rejection_sampling_strategy or "") == AUTO


def requested_options(
    config: SpeculativeConfig, request: GenerationRequest, auto_rule: str = "residual"
) -> SpeculativeConfig:
    """The configuration with a request's options, and with the rule that `auto` stands for.

    The configuration's synthetic rates do not apply to a request that names another rule.
    """
    options: dict[str, object] = {}
    if request.num_speculative_tokens is not None:
        options["num_speculative_tokens"] = request.num_speculative_tokens
    if (named := request.rejection_sampling_strategy) is not None:
        options["rejection_sampling_strategy"] = rule = canonical_name(named)
        if rule != "synthetic":
            options |= dict.fromkeys(SYNTHETIC_OPTIONS)
    if names_auto(config, request):
        options["rejection_sampling_strategy"] = auto_rule
    return config.model_copy(update=options) if options else config


def for_draft(options: SpeculativeConfig, draft: ModelInfo | None) -> SpeculativeConfig:
    """The options with the method of a draft that reads the target's hidden states, which says so itself."""
    if draft is None or not draft.drafting_method:
        return options
    return options.model_copy(update={"speculative_method": draft.drafting_method})

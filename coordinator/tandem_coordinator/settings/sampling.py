"""Sampling parameters of requests that name none: the options, and what they make of a target's own defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from tandem.config.options import Options
from tandem.config.rule import Rules, broken, rule
from tandem.errors import ConfigurationError, ModelFolderError
from tandem.model.sampling.defaults import DEFAULT_NAMES, parameters, sampling_defaults
from tandem.model.sampling.ranges import request_sampling_rules
from tandem.model.types import ModelInfo, SamplingDefaults, SamplingParams

AUTO = "auto"
"""The model's own defaults."""
VLLM = "vllm"
"""None but those of OpenAI's API."""


def _object(value: object) -> object:
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = None
    if not isinstance(read, dict):
        raise ValueError('it must be a JSON object such as {"temperature": 0.2}')
    return read


@rule(
    "`override_generation_config` names `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` or "
    "`max_new_tokens`, each with a value that a request may have, or null."
)
def _override(options: Any) -> Iterator[str]:
    override = options.override_generation_config or {}
    for name in override:
        if name not in DEFAULT_NAMES:
            yield f"override_generation_config has {name}; it must be one of {', '.join(DEFAULT_NAMES)}"
    try:
        defaults = SamplingDefaults(
            **parameters({name: value for name, value in override.items() if name in DEFAULT_NAMES})
        )
    except ValueError as error:
        yield f"override_generation_config {error}"
        return
    yield from (f"override_generation_config: {sentence}" for sentence in out_of_range(defaults))


class SamplingOptions(Options):
    """Sampling parameters that hold where a request names none."""

    generation_config: str = AUTO
    """Source of the sampling parameters that hold where a request names none. auto: the model's own, which the target
    reads in its generation_config.json. vllm: none. A folder: the generation_config.json in it. They are temperature,
    top_k, top_p, min_p and repetition_penalty; max_new_tokens limits every completion. Name and meaning are vLLM's."""
    override_generation_config: Annotated[dict[str, Any], BeforeValidator(_object)] | None = None
    """JSON object of parameters that replace those of the source, such as {"temperature": 0.2, "top_p": 0.9}; null
    takes one back. Name and meaning are vLLM's."""

    own_rules: ClassVar[Rules] = (_override,)


class SamplingPolicy:
    """Decides the sampling defaults for a target's model."""

    def __init__(self, options: SamplingOptions) -> None:
        """Read the folder that the options name, if they name one.

        Raises:
            ConfigurationError: there is no such file, or it makes no sense.
        """
        self._uses_model = options.generation_config == AUTO
        self._base = SamplingDefaults()
        self._override = parameters(options.override_generation_config or {})
        if options.generation_config in (AUTO, VLLM):
            return
        try:
            self._base = sampling_defaults(Path(options.generation_config).expanduser())
        except ModelFolderError as error:
            raise ConfigurationError(
                f"generation_config is {options.generation_config}; it must be {AUTO}, {VLLM}, or a folder: "
                f"{error}"
            ) from None

    def defaults_of(self, target: ModelInfo) -> SamplingDefaults:
        base = target.sampling_defaults if self._uses_model else self._base
        return replace(base, **self._override)

    def refusals(self, target: ModelInfo) -> Iterator[str]:
        """A sentence for each default of the target's that no request may have."""
        for sentence in out_of_range(self.defaults_of(target)):
            yield (
                f"generation_config.json: {sentence}; replace it by --override-generation-config, or leave the file "
                f"out by --generation-config {VLLM}"
            )


def out_of_range(defaults: SamplingDefaults) -> list[str]:
    """A sentence for each default that no request may have."""
    return broken(request_sampling_rules(), as_sampling(defaults))


def as_sampling(defaults: SamplingDefaults) -> SamplingParams:
    """The sampling parameters of a request that names none."""
    named: Mapping[str, Any] = {
        name: value
        for name, value in asdict(defaults).items()
        if value is not None and name != "max_new_tokens"
    }
    return SamplingParams(**named)

"""The configuration that holds for the next request; it can be changed while the coordinator runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import ValidationError

from tandem.config.options import ALIASES, sentences, unknown_option
from tandem.config.origin import Origin
from tandem.config.rule import refuse
from tandem.config.speculative import AcceptanceOptions, SourceOptions
from tandem.errors import InvalidRequestError
from tandem.model.admin import ConfigOption
from tandem_coordinator.settings.coordinator import CoordinatorSettings

logger = logging.getLogger(__name__)

LIVE_OPTIONS = (
    "speculation",
    *AcceptanceOptions.model_fields,
    "allowed_rejection_sampling_strategies",
    "draft_patience_seconds",
    "speculation_policy",
    "draft_ahead",
    "target_lead",
    "stream_interval",
)
"""Options that can change while the coordinator runs: each request reads their current values."""


class LiveConfig:
    """Starts as the settings of the process. A request keeps what held when it began."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.current = settings
        """The settings for new requests."""
        self._at_start = settings
        self._changes: dict[str, ConfigOption] = {}
        """As they were asked for; a value of None unsets the option."""

    @property
    def changes(self) -> dict[str, str]:
        """The options that were changed, as `change` takes them."""
        return {name: str(change.value or "") for name, change in self._changes.items()}

    def options(self) -> list[ConfigOption]:
        """Every option with its value and its origin."""
        values = self.current.model_dump(mode="json")
        return [self._option(name, value) for name, value in values.items()]

    def change(self, values: Mapping[str, str], reset: Iterable[str], by: str) -> list[ConfigOption]:
        """Change options for new requests, all of them or none: the named options with their new values.

        Values are spelled as on the command line; null or nothing unsets an option. Options to reset return to the
        value at the coordinator's start.
        """
        values = {spell_name(name): value for name, value in sorted(values.items())}
        reset = [spell_name(name) for name in reset]
        refuse(_problems([*values, *reset]))
        now = datetime.now(UTC)
        changes = {name: change for name, change in self._changes.items() if name not in reset}
        for name, text in values.items():
            value = None if text.strip().lower() in ("", "null", "none") else text.strip()
            changes[name] = ConfigOption(name, value, Origin.LIVE, True, by, now)
        before = self.current
        self.current = self._validate(changes)
        self._changes = changes
        named = [name for name in LIVE_OPTIONS if name in values or name in reset]
        for name in named:
            new = getattr(self.current, name)
            old = getattr(before, name)
            extra = {"option": name, "value": new, "before": old, "by": by}
            logger.info("configuration changed", extra=extra)
        current = self.current.model_dump(mode="json", include=set(named))
        return [self._option(name, current[name]) for name in named]

    def _validate(self, changes: Mapping[str, ConfigOption]) -> CoordinatorSettings:
        # Without the options' sources: their values are already here, and must not be read again.
        values = self._at_start.model_dump(exclude=set(SourceOptions.model_fields) | set(changes))
        values |= {name: change.value for name, change in changes.items() if change.value is not None}
        try:
            checked = CoordinatorSettings(**values)
        except ValidationError as error:
            raise InvalidRequestError("; ".join(sentences(error))) from None
        return self._at_start.model_copy(update={name: getattr(checked, name) for name in LIVE_OPTIONS})

    def _option(self, name: str, value: object) -> ConfigOption:
        if change := self._changes.get(name):
            return replace(change, value=value)
        return ConfigOption(
            name, value, self._at_start.origins.get(name, Origin.DEFAULT), name in LIVE_OPTIONS
        )


def spell_name(name: str) -> str:
    """An option's name as the documentation spells it."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _problems(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        if name in LIVE_OPTIONS:
            continue
        if name in CoordinatorSettings.model_fields:
            yield (
                f"{name} cannot be changed while the coordinator runs; set it where the coordinator is started. "
                f"What can be changed: {', '.join(LIVE_OPTIONS)}"
            )
        else:
            yield unknown_option(name, {option: option for option in LIVE_OPTIONS})

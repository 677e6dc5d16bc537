"""The configuration that holds for the next request; it can be changed while the coordinator runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError

from coordinator.settings.coordinator import CoordinatorSettings
from tandem.admin import ConfigOption
from tandem.config.layers import Origin
from tandem.config.options import ALIASES, sentences, unknown_option
from tandem.config.rule import refuse
from tandem.config.speculative import AcceptanceOptions, SourceOptions
from tandem.errors import InvalidRequestError

logger = logging.getLogger(__name__)

LIVE_OPTIONS = (
    "speculation",
    *AcceptanceOptions.model_fields,
    "draft_patience_seconds",
    "speculation_policy",
    "draft_ahead",
    "target_lead",
    "stream_interval",
)
"""Options that can change while the coordinator runs: each request reads their current values."""

_NOTHING = ("", "null", "none")
"""Spellings of an option that is not set."""


@dataclass(frozen=True, slots=True)
class _Change:
    value: str | None
    by: str
    at: datetime


class LiveConfig:
    """Starts as the settings of the process. A request keeps what held when it began."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.current = settings
        """The settings for new requests."""
        self._at_start = settings
        self._changes: dict[str, _Change] = {}

    @property
    def changes(self) -> dict[str, str]:
        """The options that were changed, as `change` takes them."""
        return {name: change.value or "" for name, change in self._changes.items()}

    def options(self) -> list[ConfigOption]:
        """Every option with its value and its origin."""
        values = self.current.model_dump(mode="json")
        return [self._option(name, value) for name, value in values.items()]

    def change(self, values: Mapping[str, str], reset: Iterable[str], by: str) -> list[ConfigOption]:
        """Change options for new requests, all of them or none: the named options with their new values.

        Values are spelled as on the command line; null or nothing unsets an option. Options to reset return to the
        value at the coordinator's start.
        """
        values = {spelled(name): value for name, value in sorted(values.items())}
        reset = [spelled(name) for name in reset]
        refuse(_problems([*values, *reset]))
        now = datetime.now(UTC)
        changes = {name: change for name, change in self._changes.items() if name not in reset}
        for name, text in values.items():
            value = text.strip()
            changes[name] = _Change(None if value.lower() in _NOTHING else value, by, now)
        before, self.current, self._changes = self.current, self._validated(changes), changes
        named = [name for name in LIVE_OPTIONS if name in values or name in reset]
        for name in named:
            logger.info(
                "configuration changed",
                extra={
                    "option": name,
                    "value": getattr(self.current, name),
                    "before": getattr(before, name),
                    "by": by,
                },
            )
        current = self.current.model_dump(mode="json", include=set(named))
        return [self._option(name, current[name]) for name in named]

    def _validated(self, changes: Mapping[str, _Change]) -> CoordinatorSettings:
        # Without the options' sources: their values are already here, and must not be read again.
        values = self._at_start.model_dump(exclude=set(SourceOptions.model_fields) | set(changes))
        values |= {name: change.value for name, change in changes.items() if change.value is not None}
        try:
            checked = CoordinatorSettings(**values)
        except ValidationError as error:
            raise InvalidRequestError("; ".join(sentences(error))) from None
        return self._at_start.model_copy(update={name: getattr(checked, name) for name in LIVE_OPTIONS})

    def _option(self, name: str, value: object) -> ConfigOption:
        is_live = name in LIVE_OPTIONS
        if change := self._changes.get(name):
            return ConfigOption(name, value, Origin.LIVE, is_live, change.by, change.at)
        return ConfigOption(name, value, self._at_start.origins.get(name, Origin.DEFAULT), is_live)


def spelled(name: str) -> str:
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

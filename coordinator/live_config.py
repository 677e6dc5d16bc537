"""The configuration that holds for the next request; it can be changed while the coordinator runs."""

from __future__ import annotations

from coordinator.settings import CoordinatorSettings


class LiveConfig:
    """Starts as the settings of the process. A request keeps what held when it began."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.current = settings
        """What holds for new requests."""

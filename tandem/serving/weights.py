"""WeightsService: other weights for a model that serves, and its sleep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tandem.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    NonFiniteLogitsError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
)
from tandem.model.types import InFlight, ModelInfo, Weights
from tandem.serving.server import Readiness, in_daemon_thread

logger = logging.getLogger(__name__)

SLEEP_LEVELS = (1, 2)
"""As vLLM's: 1 keeps the weights in the host's memory, 2 does not."""


@runtime_checkable
class WeightedModel(Protocol):
    """A served model whose weights may be replaced; see `tandem.engine.interface.EngineOwner`."""

    @property
    def model_info(self) -> ModelInfo: ...
    @property
    def fixed_because(self) -> str: ...
    @property
    def is_asleep(self) -> bool: ...

    def load_weights(self, folder: Path, version: int, *, continues: bool) -> Any: ...
    async def replace_weights(self, candidate: Any) -> None: ...
    async def sleep(self, level: int) -> None: ...
    async def wake_up(self) -> None: ...


class WeightsControl:
    """Replaces a service's weights, and lets it sleep, one call after the other."""

    def __init__(
        self, name: str, root: Path | None, readiness: Callable[[], Readiness], fail: Callable[[], None]
    ) -> None:
        """
        Args:
            name: Of the service: draft or target.
            root: Folder below which weights must lie; None where none are loaded.
            readiness: Of the server.
            fail: Ends the server where neither the new weights nor the old ones can be served.
        """
        self._name = name
        self._root = root
        self._readiness = readiness
        self._fail = fail
        self._model: object | None = None
        self._doing = ""
        """The change in progress, as a participle; empty while there is none."""
        self._level = 0
        """Of the sleep; 0: it is awake."""
        self._changing: asyncio.Task[None] | None = None

    def serve(self, model: object) -> None:
        """Take the model, once it is loaded."""
        self._model = model

    async def close(self) -> None:
        """Wait for the end of a change that has begun."""
        if self._changing is not None:
            await asyncio.gather(self._changing, return_exceptions=True)

    async def load(self, path: str, in_flight: InFlight, version: int = 0) -> tuple[Weights, int]:
        """Replace the weights; returns the new ones, and how many sequences were ended for them."""
        model = self._served("weights cannot be loaded")
        present = _weights(model)
        folder = folder_below(self._root, path)
        wanted = version or present.version + 1
        if wanted <= present.version:
            raise InvalidRequestError(
                f"version is {version}; it must be above that of the present weights, {present.version}"
            )
        async with self._only("weights are being loaded"):
            read = partial(model.load_weights, folder, wanted, continues=in_flight is InFlight.RESTART)
            try:
                candidate = await in_daemon_thread(read)
                change = partial(model.replace_weights, candidate)
                ended = await self._change("replaces its weights", in_flight, change)
            except (ConfigurationError, NonFiniteLogitsError) as error:
                raise InvalidRequestError(f"the old weights serve on: {error}") from error
        now = _weights(model)
        logger.info(
            "weights loaded",
            extra={
                "folder": str(folder),
                "version": now.version,
                "fingerprint": now.fingerprint,
                "ended": ended,
            },
        )
        return now, ended

    async def sleep(self, level: int, in_flight: InFlight) -> tuple[Weights, int]:
        """Free memory until `wake_up`; returns the weights, and how many sequences were ended for it."""
        model = self._served("the service cannot sleep")
        if level not in SLEEP_LEVELS:
            raise InvalidRequestError(f"level is {level}; it must be 1 or 2")
        if self._level and self._level != level:
            raise InvalidRequestError(
                f"the service sleeps on level {self._level} already; wake it up before it sleeps on level {level}"
            )
        ended = 0
        if not self._level:
            async with self._only("the service falls asleep"):
                change = partial(model.sleep, level)
                ended = await self._change(_sleeps(level), in_flight, change, level)
        return _weights(model), ended

    async def wake_up(self) -> Weights:
        """End the sleep; returns the weights that serve."""
        model = self._served("the service cannot wake up")
        if self._level:
            async with self._only("the service wakes up"):
                try:
                    await self._change("wakes up", InFlight.FINISH, model.wake_up)
                except ConfigurationError as error:
                    raise InvalidRequestError(f"the service sleeps on: {error}") from error
        return _weights(model)

    def _served(self, sentence: str) -> WeightedModel:
        if self._model is None:
            raise ServiceUnavailableError(f"{sentence}: the {self._name} service is still starting")
        if not isinstance(self._model, WeightedModel):
            raise InvalidRequestError(f"{sentence}: this {self._name} works without a model, so it has none")
        if self._model.fixed_because:
            raise InvalidRequestError(f"{sentence}: {self._model.fixed_because}")
        return self._model

    @asynccontextmanager
    async def _only(self, doing: str) -> AsyncIterator[None]:
        """Do one thing at a time."""
        if self._doing:
            raise CapacityError(f"{self._doing} already; try again once that has ended")
        self._doing = doing
        try:
            yield
        finally:
            if self._changing is None:
                self._doing = ""

    async def _change(
        self, doing: str, in_flight: InFlight, change: Callable[[], Any], level: int = 0
    ) -> int:
        """Change the model while no call runs; it then sleeps on the level. Whoever gives up before the change has
        begun has changed nothing; from then on it is done to the end."""
        readiness = self._readiness()
        reason = f"the {self._name} service {doing}"
        await readiness.hold(reason)
        try:
            ended = await readiness.end_calls(_ending(reason, in_flight))
        except BaseException:
            await self._settle()
            raise
        self._changing = asyncio.create_task(self._finish(change, level))
        await asyncio.shield(self._changing)
        return ended

    async def _finish(self, change: Callable[[], Any], level: int) -> None:
        model = self._model
        assert isinstance(model, WeightedModel)
        try:
            await change()
            self._level = level
        except Exception as error:
            if model.is_asleep and not self._level:
                self._fail()
            if not isinstance(error, TandemError):
                logger.exception("weights cannot be changed")
                raise ConfigurationError("the change failed; the service's log says why") from error
            raise
        finally:
            await self._settle()
            self._changing = None
            self._doing = ""

    async def _settle(self) -> None:
        """Serve, or say that the service sleeps."""
        if self._level:
            await self._readiness().hold(f"the {self._name} service {_sleeps(self._level)}")
        else:
            await self._readiness().release()


def _sleeps(level: int) -> str:
    return f"sleeps (level {level}); tandem admin wake wakes it up"


def _ending(reason: str, in_flight: InFlight) -> TandemError | None:
    """The error with which open sequences end; None where they go on to their ends."""
    if in_flight is InFlight.FINISH:
        return None
    return ServiceUnavailableError(f"{reason}, and was told to {in_flight.value} what is in flight")


def _weights(model: WeightedModel) -> Weights:
    weights = model.model_info.weights
    assert weights is not None, "a model of which weights can be replaced has some"
    return weights


def folder_below(root: Path | None, path: str) -> Path:
    """The folder that a path names, links followed. It and all of its files must lie below the root."""
    if root is None:
        raise PermissionDeniedError(
            "this service loads no weights: its operator has named no --weights-root below which they must lie"
        )
    if not path or "\0" in path:
        raise InvalidRequestError("path is empty or no path; it must name a folder of weights")
    top = root.resolve()
    outside = PermissionDeniedError(
        f"path is {path!r}, which is not below --weights-root; weights must lie there, links followed"
    )
    try:
        folder = (top / path).resolve()
        if not folder.is_relative_to(top):
            raise outside
        # A link of a file may lead outside as well.
        files = list(folder.iterdir()) if folder.is_dir() else []
        if not all(each.resolve().is_relative_to(top) for each in files):
            raise outside
    except (OSError, RuntimeError):
        raise InvalidRequestError(f"path is {path!r}, which cannot be read") from None
    return folder

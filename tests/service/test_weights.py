"""Weights that change while services run, with real engines and tiny models: each text is that of a service that was
started with the weights that made it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.clients.weights_client import WeightsClient
from tandem.errors import (
    AbortedError,
    CapacityError,
    InvalidRequestError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
)
from tandem.model.replica import ReplicaState, Role
from tandem.model.types import GenerationRequest, InFlight
from tandem.rpc.credentials import Credentials
from tandem.serving.server import serve
from tandem_coordinator.service import CoordinatorService
from tandem_draft.service import DraftService
from tandem_draft.settings import DraftSettings
from tandem_target.service import TargetService
from tandem_target.settings import TargetSettings
from tests.end_to_end.models import random_model, save_model
from tests.service.clients import complete, complete_all, until
from tests.service.engines import TINY
from tests.service.fakes import HANG_SECONDS, serving, settings_for

ADMIN = "an-admin-token-of-the-service"
COORDINATOR = "a-token-of-the-coordinator"
TOKENS = 48
STRICT = GenerationRequest(
    (3, 4), max_tokens=TOKENS, temperature=1.0, seed=5, ignore_eos=True, rejection_sampling_strategy="strict"
)
MANY = [replace(STRICT, prompt=(1, 2, 3, index), seed=index) for index in range(6)]


@dataclass
class Running:
    """A service that serves as its process would."""

    address: str
    service: Any
    stop: asyncio.Event
    task: asyncio.Task[None]

    def admin(self, token: str = ADMIN) -> WeightsClient:
        return WeightsClient(self.address, Credentials(token=token), HANG_SECONDS)


@asynccontextmanager
async def running(
    kind: type[TargetService] | type[DraftService],
    folder: Path,
    root: Path | None,
    monkeypatch: Any,
    **options: Any,
) -> AsyncIterator[Running]:
    """Run a whole service in this process, on a free port, until the block ends."""
    settings_class: Any = TargetSettings if kind is TargetService else DraftSettings
    usual = {"port": 0, "max_length": 128, "compile": "off", "threads": 1, "dtype": "float32"}
    settings = settings_class(
        model=folder,
        weights_root=root,
        admin_token=ADMIN,
        auth_token=COORDINATOR,
        drain_timeout_seconds=0.0,
        **(usual | options),
    )
    service = kind(settings)
    lines: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr("tandem.serving.server.announce", lines.put_nowait)
    monkeypatch.setattr("tandem.serving.model_service.announce", lambda _: None)
    stop = asyncio.Event()

    monkeypatch.setattr("tandem.serving.server.stop_signals", lambda: nullcontext(stop))
    task = asyncio.create_task(serve(settings, service))
    while " ready on " not in (line := await lines.get()):
        assert not task.done()
    try:
        yield Running(line.rpartition(" ")[2], service, stop, task)
    finally:
        stop.set()
        await task


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of weights: `one`, `two` and `draft` of one model, and what must be refused."""
    top = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("one", "two", "three", "draft"), 1):
        save_model(random_model(seed, **TINY), top / name)
    save_model(random_model(7, **(TINY | {"num_hidden_layers": 2})), top / "deeper")
    for name in ("nan", "missing", "additional"):
        shutil.copytree(top / "two", top / name)
        tensors = load_file(top / name / "model.safetensors")
        first = min(name for name in tensors if "q_proj" in name)
        if name == "nan":
            tensors[first][0, 0] = float("nan")
        elif name == "missing":
            del tensors[first]
        else:
            tensors["model.layers.9.extra.weight"] = torch.zeros(2, 2)
        save_file(tensors, top / name / "model.safetensors", metadata={"format": "pt"})
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(top / "two", outside / "two")
    (top / "link").symlink_to(outside / "two")
    return top


@pytest.fixture(scope="module")
def texts(root: Path) -> dict[str, list[Sequence[int]]]:
    """The tokens of `MANY` by services that were started with each weights, without a draft."""

    async def of(name: str) -> list[Sequence[int]]:
        with pytest.MonkeyPatch.context() as patch:
            async with (
                running(TargetService, root / name, None, patch) as target,
                over(target) as (client, _),
            ):
                return [done.token_ids for done in await complete_all(client.address, MANY)]

    return {name: asyncio.run(of(name)) for name in ("one", "two")}


@asynccontextmanager
async def over(
    target: Running, *others: Running, draft: Running | None = None, **options: Any
) -> AsyncIterator[tuple[Client, CoordinatorService]]:
    addresses = ",".join(each.address for each in (target, *others))
    async with AsyncExitStack() as stack:
        settings = settings_for(
            addresses, draft.address if draft else None, service_token=COORDINATOR, **options
        )
        service = CoordinatorService(settings)
        await service.start()
        stack.push_async_callback(service.close)
        address, _ = await stack.enter_async_context(serving(service.register, steps=service.steps))
        yield await stack.enter_async_context(Client(address)), service


async def test_texts_are_those_of_fresh_services_before_and_after_a_load(
    root: Path, texts: dict[str, list[Sequence[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        target = await enter(running(TargetService, root / "one", root, monkeypatch))
        draft = await enter(running(DraftService, root / "draft", root, monkeypatch))
        client, _ = await enter(over(target, draft=draft))
        before = await complete_all(client.address, MANY)
        assert [done.token_ids for done in before] == texts["one"]
        async with AdminClient(client.address) as admin:
            loaded = await admin.load_weights("target", "two", services=Credentials(token=ADMIN))
        assert [weights.version for weights in loaded.values()] == [2]
        after = await complete_all(client.address, MANY)
        assert [done.token_ids for done in after] == texts["two"]
        assert {done.summary.weights[0].version for done in before} == {1}
        assert {done.summary.weights for done in after} == {tuple(loaded.values())}
        # Other weights of the draft change no text.
        async with draft.admin() as own:
            await own.load_weights("two")
        assert [done.token_ids for done in await complete_all(client.address, MANY)] == texts["two"]


@pytest.mark.parametrize("in_flight", InFlight)
async def test_requests_in_flight_end_as_the_mode_says(
    in_flight: InFlight, root: Path, texts: dict[str, list[Sequence[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(TargetService, root / "one", root, monkeypatch) as target, over(target) as (client, _):
        begun = [asyncio.Event() for _ in MANY]

        async def one(index: int) -> tuple[list[int], Any]:
            tokens: list[int] = []
            summary = None
            async for chunk in client.generate(MANY[index]):
                tokens += chunk.token_ids
                summary = chunk.summary
                begun[index].set()
            return tokens, summary

        work = [asyncio.create_task(one(index)) for index in range(len(MANY))]
        await asyncio.gather(*(each.wait() for each in begun))
        async with target.admin() as admin:
            loading = asyncio.create_task(admin.load_weights("two", in_flight))
            found = await asyncio.gather(*work, return_exceptions=True)
            weights = await loading
        if in_flight is InFlight.FINISH:
            assert [each[0] for each in found if isinstance(each, tuple)] == [list(t) for t in texts["one"]]
        for each in found:
            if isinstance(each, BaseException):
                assert in_flight is InFlight.ABORT
                assert isinstance(each, AbortedError), each
                continue
            assert in_flight is not InFlight.ABORT
            tokens, summary = each
            assert len(tokens) == TOKENS, "no token is lost or doubled"
            if in_flight is InFlight.RESTART:
                assert summary.weights[-1].fingerprint in {
                    weights.fingerprint,
                    *weights.continued_fingerprints,
                }
        if in_flight is InFlight.RESTART:
            assert any(len(each[1].weights) == 2 for each in found if isinstance(each, tuple))
        after = await complete_all(client.address, MANY)
        assert [done.token_ids for done in after] == texts["two"]


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("deeper", InvalidRequestError, "parameter_count"),
        ("nan", InvalidRequestError, "NaN or infinity"),
        ("missing", InvalidRequestError, "missing"),
        ("additional", InvalidRequestError, r"does not have: model\.layers\.9"),
        ("nowhere", InvalidRequestError, "nothing is there"),
        ("link", PermissionDeniedError, "below --weights-root"),
        ("../outside", PermissionDeniedError, "below --weights-root"),
        ("/etc", PermissionDeniedError, "below --weights-root"),
        ("", InvalidRequestError, "path is empty"),
    ],
)
async def test_what_is_wrong_is_refused_and_the_old_weights_serve_on(
    path: str,
    error: type[TandemError],
    sentence: str,
    root: Path,
    texts: dict[str, list[Sequence[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(TargetService, root / "one", root, monkeypatch) as target, over(target) as (client, _):
        async with target.admin() as admin:
            with pytest.raises(error, match=sentence) as refused:
                await admin.load_weights(path)
        assert "\n" not in str(refused.value)
        done = await complete(client, MANY[0])
        assert done.token_ids == texts["one"][0]
        assert done.summary.weights[0].version == 1


async def test_only_an_admin_of_the_service_loads_weights(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(TargetService, root / "one", root, monkeypatch) as target:
        async with target.admin(COORDINATOR) as coordinator:
            with pytest.raises(PermissionDeniedError, match="an admin call needs an admin token"):
                await coordinator.load_weights("two")
        async with target.admin("some-other-token-of-nobody") as stranger:
            with pytest.raises(UnauthenticatedError):
                await stranger.load_weights("two")
            with pytest.raises(UnauthenticatedError):
                await stranger.sleep()
    async with running(TargetService, root / "one", None, monkeypatch) as target, target.admin() as admin:
        with pytest.raises(PermissionDeniedError, match="no --weights-root"):
            await admin.load_weights(str(root / "two"))


async def test_of_two_loads_at_once_one_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(TargetService, root / "one", root, monkeypatch) as target, target.admin() as admin:
        found = await asyncio.gather(
            admin.load_weights("two"), admin.load_weights("three"), return_exceptions=True
        )
        refused = [each for each in found if isinstance(each, BaseException)]
        assert [type(each) for each in refused] == [CapacityError]
        assert "being loaded already" in str(refused[0])


async def test_a_target_with_older_weights_is_incompatible_until_it_has_the_same(
    root: Path, texts: dict[str, list[Sequence[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        first = await enter(running(TargetService, root / "one", root, monkeypatch))
        second = await enter(running(TargetService, root / "one", root, monkeypatch))
        client, service = await enter(over(first, second))
        members = service.replicas.targets.members
        await until(lambda: all(member.is_ready for member in members.values()))
        async with first.admin() as admin:
            await admin.load_weights("two")
        await until(lambda: members[second.address].state is ReplicaState.INCOMPATIBLE)
        assert "load the same" in members[second.address].snapshot().reason
        assert [done.token_ids for done in await complete_all(client.address, MANY)] == texts["two"]
        async with second.admin() as admin:
            await admin.load_weights("two")
        await until(lambda: all(member.is_ready for member in members.values()))
        async with AdminClient(client.address) as admin:
            shots = [shot for shot in await admin.replicas() if shot.role is Role.TARGET]
        assert len({shot.model.weights for shot in shots if shot.model is not None}) == 1


@pytest.mark.parametrize("level", [1, 2])
async def test_a_service_that_slept_serves_the_same_texts(
    level: int, root: Path, texts: dict[str, list[Sequence[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(TargetService, root / "one", root, monkeypatch))
        async with over(target, target_wait_seconds=0.2) as (client, service), target.admin() as admin:
            await admin.sleep(level)
            (member,) = service.replicas.targets.members.values()
            await until(lambda: "sleeps" in member.snapshot().reason)
            assert not member.is_ready
            assert target.service._models[0].kv_usage().total_tokens == 0
            with pytest.raises(ServiceUnavailableError):
                await complete(client, MANY[0])
            await admin.wake_up()
            await until(lambda: member.is_ready)
            assert (await complete(client, MANY[0])).token_ids == texts["one"][0]
            await admin.sleep(level)
            await admin.load_weights("two")  # which wakes it up
            await until(lambda: member.is_ready)
            assert (await complete(client, MANY[0])).token_ids == texts["two"][0]

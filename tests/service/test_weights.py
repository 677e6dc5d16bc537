"""Weights that change while services run, with real engines and tiny models: each text is that of a service that was
started with the weights that made it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client, serves
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
from tests.commands import Commands, Ran
from tests.end_to_end.models import random_model, save_model
from tests.heads import save_medusa
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
    folder: Path | None,
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


def save_spoilt(top: Path) -> None:
    """Save copies of `two` that must be refused: `nan`, `missing` and `additional`."""
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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of weights: `one`, `two` and `draft` of one model, and what must be refused."""
    top = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("one", "two", "three", "draft"), 1):
        save_model(random_model(seed, **TINY), top / name)
    save_model(random_model(7, **(TINY | {"num_hidden_layers": 2})), top / "deeper")
    save_spoilt(top)
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


async def test_a_load_may_follow_another_before_the_coordinator_knows_of_it(
    root: Path, texts: dict[str, list[Sequence[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's steps may be shorter than the time between two health checks."""
    async with running(TargetService, root / "one", root, monkeypatch) as target, over(target) as (client, _):
        async with AdminClient(client.address) as admin:
            for version, name in enumerate(("two", "three", "two"), 2):
                loaded = await admin.load_weights("target", name, services=Credentials(token=ADMIN))
                assert loaded[target.address].version == version
        done = await complete(client, MANY[0])
    assert done.token_ids == texts["two"][0]


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
            assert target.service.models[0].kv_usage().total_tokens == 0
            with pytest.raises(ServiceUnavailableError):
                await complete(client, MANY[0])
            await admin.wake_up()
            await until(lambda: member.is_ready)
            assert (await complete(client, MANY[0])).token_ids == texts["one"][0]
            await admin.sleep(level)
            await admin.load_weights("two")  # which wakes it up
            await until(lambda: member.is_ready)
            assert (await complete(client, MANY[0])).token_ids == texts["two"][0]


# ---- services whose weights stay


FIXED: list[tuple[str, dict[str, Any], str]] = [
    (
        "hidden states",
        {"eagle_aux_hidden_state_layer_ids": (1,)},
        "it writes the hidden states of its present weights",
    ),
    ("head", {"speculative_method": "medusa"}, "it hosts the drafting head head, which reads the states"),
]


@pytest.mark.parametrize(("kind", "options", "sentence"), FIXED)
async def test_a_target_that_others_read_keeps_its_weights(
    kind: str,
    options: dict[str, Any],
    sentence: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = dict(options)
    if kind == "head":
        model = random_model(1, **TINY)
        save_medusa(tmp_path / "head", model)
        own["draft_model"] = tmp_path / "head"
    else:
        own["shared_storage_path"] = tmp_path / "states"
    async with running(TargetService, root / "one", root, monkeypatch, **own) as target:
        await assert_keeps_weights(target, sentence)


async def test_a_draft_without_a_model_has_no_weights(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ngram: dict[str, Any] = {"speculative_method": "ngram", "max_length": None, "dtype": "auto"}
    async with running(DraftService, None, root, monkeypatch, **ngram) as draft:
        await assert_keeps_weights(draft, "this draft works without a model, so it has none")


async def assert_keeps_weights(service: Running, sentence: str) -> None:
    """Each verb is refused in one sentence, and the service serves on."""
    async with service.admin() as admin:
        for ask in (partial(admin.load_weights, "two"), admin.sleep, admin.wake_up):
            with pytest.raises(InvalidRequestError) as refused:
                await ask()
            assert sentence in str(refused.value)
            assert "\n" not in str(refused.value)
        assert await serves(admin._channel, HANG_SECONDS)


# ---- the commands


@dataclass
class Operator:
    """Runs `tandem admin` against a coordinator, with an admin token of the services."""

    coordinator: str
    token_file: Path

    async def run(self, *words: str, token: Path | None = None) -> Ran:
        options = ("--address", self.coordinator, "--service-token-file", str(token or self.token_file))
        return await asyncio.to_thread(Commands().run, "admin", *words, *options)


async def test_the_commands_change_weights_and_say_in_their_exit_codes_how_it_went(
    root: Path, texts: dict[str, list[Sequence[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    good = tmp_path / "token"
    good.write_text(f"{ADMIN}\n")
    wrong = tmp_path / "wrong"
    wrong.write_text(f"{COORDINATOR}\n")
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(TargetService, root / "one", root, monkeypatch))
        client, service = await stack.enter_async_context(over(target, target_wait_seconds=0.2))
        operator = Operator(client.address, good)
        (member,) = service.replicas.targets.members.values()

        loaded = await operator.run(
            "weights", "load", "target", "--path", "two", "--replica", target.address, "-o", "json"
        )
        assert (loaded.code, loaded.err) == (0, "")
        assert [each["version"] for each in json.loads(loaded.out).values()] == [2]
        assert (await complete(client, MANY[0])).token_ids == texts["two"][0]

        for path, words in (
            ("deeper", "new weights must be of the same model"),
            ("nan", "NaN or infinity"),
            ("../outside", "which is not below --weights-root"),
            ("nowhere", "nothing is there"),
        ):
            refused = await operator.run("weights", "load", "target", "--path", path)
            assert (refused.code, refused.out) == (5, ""), refused
            (line,) = refused.err.splitlines()
            assert line.startswith("error: ")
            assert words in line
        denied = await operator.run("weights", "load", "target", "--path", "one", token=wrong)
        assert denied.code == 5
        assert "needs an admin token" in denied.err
        unknown = await operator.run("weights", "load", "target", "--path", "one", "--replica", "127.0.0.1:1")
        assert (unknown.code, unknown.out) == (5, "")
        assert "127.0.0.1:1" in unknown.err
        nobody = await operator.run("weights", "load", "draft", "--path", "one")
        assert (nobody.code, nobody.out) == (5, "")
        pathless = await operator.run("weights", "load", "target")
        assert pathless.code == 2
        assert (await complete(client, MANY[0])).token_ids == texts["two"][0]

        slept = await operator.run("sleep", "target", "--level", "2")
        assert (slept.code, slept.err) == (0, "")
        await until(lambda: not member.is_ready)
        deeper = await operator.run("sleep", "target", "--level", "1")
        assert deeper.code == 5
        assert "the service sleeps on level 2 already; wake it up" in deeper.err
        nonsense = await operator.run("sleep", "target", "--level", "3")
        assert nonsense.code == 5
        assert "level is 3; it must be 1 or 2" in nonsense.err
        woken = await operator.run("wake", "target")
        assert (woken.code, woken.err) == (0, "")
        await until(lambda: member.is_ready)
        assert (await operator.run("wake", "target")).code == 0, "who is awake stays awake"
        assert (await complete(client, MANY[0])).token_ids == texts["two"][0]
    gone = await operator.run("weights", "load", "target", "--path", "one")
    assert gone.code == 4

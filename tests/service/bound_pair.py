"""Targets with a drafting head beside them, in this process, and coordinators over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from bound_service.loading import BoundPair, load_pair
from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.servicer import DraftServicer
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings
from tests.eagle_heads import save_eagle
from tests.end_to_end.models import random_model, save_model
from tests.heads import save_eagle3
from tests.medusa_heads import save_medusa
from tests.service.fakes import coordinator, serving


def small_target() -> Any:
    """A model of six tokens, so that a head of random weights is right now and then."""
    return random_model(
        10,
        vocab_size=6,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )


METHODS = ("eagle", "eagle3", "medusa")


def saved_pair(folder: Path, model: Any, method: str = "eagle3") -> tuple[Path, Path]:
    """Write the target and a head for it. EAGLE-3's and Medusa's say five of the six tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target").mkdir()
    if method == "eagle":
        head = save_eagle(folder / "eagle-head", model)
    elif method == "medusa":
        head = save_medusa(folder / "head", model, draft_vocabulary=5)
    else:
        head = save_eagle3(folder / "head", model, draft_vocabulary=5, norm_output=True)
    return save_model(model, folder / "target"), head


@dataclass(frozen=True)
class Host:
    """Both services on one port."""

    address: str
    server: grpc.aio.Server
    pair: BoundPair


@asynccontextmanager
async def host(target: Path, head: Path | None, **settings: object) -> AsyncIterator[Host]:
    """A target with its head, ready; None for the prediction layers in the target's own checkpoint."""
    values: dict[str, Any] = {"model": target, "threads": 1, "max_length": 128, "compile": "off", **settings}
    pair = load_pair(TargetSettings(**values), head)
    targets, drafts = TargetServicer(), DraftServicer()
    targets.verifier, drafts.proposer = pair.verifier, pair.proposer

    def register(server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(targets, server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(drafts, server)

    async with AsyncExitStack() as stack:
        for engine in (pair.verifier, pair.proposer):
            await engine.start()
            stack.push_async_callback(engine.close)
        yield Host(*await stack.enter_async_context(serving(register)), pair)


@asynccontextmanager
async def over(*hosts: Host, **settings: object) -> AsyncIterator[tuple[str, CoordinatorService]]:
    """A coordinator that knows the targets' addresses alone."""
    values: dict[str, Any] = {
        "target_address": ",".join(each.address for each in hosts),
        "draft_patience_seconds": 30.0,
        "speculation_policy": "fixed",
        **settings,
    }
    async with coordinator(CoordinatorSettings(**values)) as served:
        yield served

"""A coordinator before two scripted services, as processes."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.services import process

RULES = ("greedy", "strict", "residual", "block")
_SCRIPTED = "benchmarks.load.scripted_services"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes that run."""

    address: str
    """Of the coordinator."""
    pids: Mapping[str, int]
    """Processes by name: coordinator, target, draft, and clients for this one."""
    metrics_url: str
    """Empty where no metrics are collected."""
    http_url: str
    """Of the coordinator over HTTP; empty where it does not listen there."""


@asynccontextmanager
async def cluster(
    rule: str,
    options: argparse.Namespace,
    *,
    has_metrics: bool = False,
    has_http: bool = False,
    more: Sequence[str] = (),
) -> AsyncIterator[Cluster]:
    """Run a coordinator under a rule before a scripted target and a scripted draft.

    Args:
        rule: Acceptance rule of requests above temperature 0; greedy: the coordinator's default.
        options: `workers`, `stream_interval`, `num_speculative_tokens`, `acceptance`, `verify_ms` and `draft_ms`;
            `without_columns` for services of the release before messages had columns.
        has_metrics: Whether the coordinator collects metrics, which costs it a little.
        has_http: Whether the coordinator also listens for HTTP.
        more: Further options of the coordinator.
    """
    async with AsyncExitStack() as stack:
        started = await _scripted_services(stack, options)
        port = _free_port() if has_metrics else None
        http_port = _free_port() if has_http else None
        address, pid = await stack.enter_async_context(
            process(
                "coordinator",
                *("--target-address", started["target"][0], "--draft-address", started["draft"][0]),
                *("--num-speculative-tokens", str(options.num_speculative_tokens)),
                *("--speculation-policy", "fixed", "--draft-ahead", "off"),
                *(() if rule == "greedy" else ("--rejection-sampling-strategy", rule)),
                *("--workers", str(options.workers), "--stream-interval", str(options.stream_interval)),
                *(() if port is None else ("--prometheus-port", str(port))),
                *(() if http_port is None else ("--http-port", str(http_port))),
                *more,
            )
        )
        pids = {"coordinator": pid} | {name: each for name, (_, each) in started.items()}
        url = "" if port is None else f"http://127.0.0.1:{port}/metrics"
        http_url = "" if http_port is None else f"http://127.0.0.1:{http_port}"
        yield Cluster(address, pids | {"clients": os.getpid()}, url, http_url)


async def _scripted_services(
    stack: AsyncExitStack, options: argparse.Namespace
) -> dict[str, tuple[str, int]]:
    """Start a target and a draft; address and process of each by role."""
    old = ("--without-columns",) if getattr(options, "without_columns", False) else ()
    started: dict[str, tuple[str, int]] = {}
    for role, step in (("target", options.verify_ms), ("draft", options.draft_ms)):
        words = ("--role", role, "--step-ms", str(step), "--acceptance", str(options.acceptance))
        started[role] = await stack.enter_async_context(process(_SCRIPTED, *words, *old))
    return started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

"""`tandem admin doctor`: finds problems from here and from the coordinator; `tandem doctor draft` and `target` play the
protocol of services."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer
from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem import __version__
from tandem.clients.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient
from tandem.errors import (
    ConfigurationError,
    PermissionDeniedError,
    ServiceUnavailableError,
    TandemError,
    UnauthenticatedError,
    plural,
)
from tandem.model.admin import Diagnosis, Finding, Severity
from tandem.model.types import ModelInfo
from tandem.rpc.addresses import is_local
from tandem.rpc.channels import DEFAULT_MESSAGE_LIMIT_BYTES, open_channel
from tandem.rpc.credentials import Credentials
from tandem_coordinator.cli.command import OutputOptions, VerbOptions, command
from tandem_coordinator.cli.connection import Connection, Endpoint
from tandem_coordinator.cli.main import Exit, app, exit_code
from tandem_coordinator.cli.views import milliseconds

SKEW_SECONDS = 1.0
"""Clocks that differ by more make logs and traces of two machines hard to read together."""
FAR_SECONDS = 0.2
"""A round trip to the coordinator that a person notices at the start of each answer."""

_MARKS = {
    Severity.OK: Text("✓", style="green"),
    Severity.WARNING: Text("!", style="bold yellow"),
    Severity.PROBLEM: Text("✗", style="bold red"),
}


async def examine(connection: Connection) -> tuple[list[Finding], int]:
    """Everything that can be found, and the exit code: 0 if requests can be completed."""
    where = connection.endpoint
    findings = [await _reached(where.address, connection.timeout or DEFAULT_TIMEOUT_SECONDS)]
    if findings[0].severity is Severity.PROBLEM:
        return findings, Exit.UNREACHABLE
    findings.append(transport(where))
    try:
        async with connection.admin_client() as client:
            round_trip = min(await round_trips(client, 5))  # the first one opens the connection
            before = datetime.now().astimezone()
            began = time.perf_counter()
            diagnosis = await client.diagnose()
            took = time.perf_counter() - began
    except TandemError as error:
        return [*findings, report_refusal(where, error)], exit_code(error)
    findings += [distance(round_trip), version(diagnosis), clock(before, took, diagnosis.time)]
    findings += diagnosis.findings
    has_problem = any(finding.severity is Severity.PROBLEM for finding in findings)
    return findings, Exit.UNHEALTHY if has_problem else Exit.OK


async def _reached(address: str, seconds: float) -> Finding:
    if address.startswith("unix:"):
        return Finding.ok("address", "a socket of this machine", address)
    host, _, port = address.rpartition(":")
    began = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        advice = "start the coordinator there, or name another with --address or tandem context use"
        return Finding.problem("address", f"it cannot be reached: {reason}", advice, address)
    took = milliseconds(time.perf_counter() - began)
    return Finding.ok("address", f"it accepts connections, within {took}", address)


async def round_trips(client: AdminClient, count: int) -> list[float]:
    """Seconds of messages that ask for no work, and their answers."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await client.is_serving()
        seconds.append(time.perf_counter() - began)
    return seconds


def transport(where: Endpoint) -> Finding:
    """Find whether others can read the connection."""
    if where.credentials.uses_tls:
        return Finding.ok("TLS", "the connection is encrypted")
    if is_local(where.address):
        return Finding.ok("TLS", "plain text, within this machine")
    advice = "start the coordinator with --tls-cert-file and --tls-key-file, and give --tls-ca-file here"
    return Finding.warning("TLS", "prompts, completions and the token travel in plain text", advice)


def report_refusal(where: Endpoint, error: TandemError) -> Finding:
    """Reason why the coordinator could not be asked, though it is there."""
    check = "answer"
    advice = ""
    if isinstance(error, UnauthenticatedError | PermissionDeniedError):
        check = "token"
        advice = "give the coordinator's admin token with --token-file"
    elif isinstance(error, ServiceUnavailableError) and where.credentials.uses_tls:
        advice = "check --tls-ca-file and --tls-server-name, and whether it speaks TLS at all"
    elif isinstance(error, ServiceUnavailableError):
        advice = "if it speaks TLS, give --tls or --tls-ca-file; else it may not be a coordinator"
    return Finding.problem(check, str(error), advice, where.address)


def distance(seconds: float) -> Finding:
    """Compare the time of a round trip with what a person notices."""
    words = f"{milliseconds(seconds)} from here to the coordinator and back"
    if seconds <= FAR_SECONDS:
        return Finding.ok("round trip", words)
    return Finding.warning("round trip", words, "each answer begins that much later")


def version(diagnosis: Diagnosis) -> Finding:
    """Compare the versions of the two ends."""
    there = diagnosis.version
    if there == __version__:
        return Finding.ok("version", f"{there} here and there")
    advice = f"install tandem {there} here, or upgrade the coordinator"
    return Finding.warning("version", f"{__version__} here, {there} there", advice)


def clock(before: datetime, took: float, coordinator_time: datetime) -> Finding:
    """Difference of the two clocks, assuming that the coordinator read its own halfway through the call."""
    apart = abs((coordinator_time - before).total_seconds() - took / 2)
    if apart - took / 2 <= SKEW_SECONDS:
        return Finding.ok("clock", f"{milliseconds(apart)} apart, give or take {milliseconds(took / 2)}")
    words = f"{apart:.1f} s apart: logs and traces of the two machines do not fit together"
    return Finding.warning("clock", words, "synchronise the clocks of both machines (NTP)")


def doctor_view(findings: Sequence[Finding]) -> RenderableType:
    """All findings, each with what to do, and how many there are of each kind."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for finding in findings:
        words = f"{finding.subject}: {finding.detail}" if finding.subject else finding.detail
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        table.add_row(_MARKS[finding.severity], finding.check, words + advice)
    counts = Counter(finding.severity for finding in findings)
    words = (
        f"{plural(len(findings), 'check')}: {counts[Severity.OK]} fine, "
        f"{plural(counts[Severity.WARNING], 'warning')}, {plural(counts[Severity.PROBLEM], 'problem')}"
    )
    return Group(table, "", words)


# ---- services


class ServiceOptions(VerbOptions):
    """How to reach a service. No context is asked: these belong to coordinators, and so do their tokens."""

    tls: Annotated[bool, typer.Option("--tls")] = False
    """Connect by TLS."""
    tls_ca_file: Path | None = None
    """PEM file of the authorities to trust; implies --tls."""
    tls_cert_file: Path | None = None
    """PEM file of your own certificate, for mutual TLS."""
    tls_key_file: Path | None = None
    """PEM file of its key."""
    tls_server_name: str = ""
    """Name in the service's certificate, where not the address's."""
    token_file: Path | None = None
    """File whose first line is the service's token."""
    timeout: float = Field(default=10.0, ge=0.1)
    """Seconds that an answer may take."""


@asynccontextmanager
async def _open_service(address: str, service: ServiceOptions) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a service. Errors that say it is of the other kind name its address, and the command for it."""
    # Only where it is asked for
    from tandem_coordinator.transport.services import OtherServiceError

    credentials = Credentials.of(service.model_dump())
    async with open_channel(address, DEFAULT_MESSAGE_LIMIT_BYTES, credentials) as channel:
        try:
            yield channel
        except OtherServiceError as error:
            kind = error.found.value
            raise ConfigurationError(
                f"{address} is a {kind} service ({error.name}); give the address of a {error.wanted.value} service, or "
                f"check this one with tandem doctor {kind}"
            ) from error


def _show_conformance(findings: Sequence[Finding], output: OutputOptions) -> None:
    """Show what was found of a service, and fail if it differs from the protocol."""
    conforms = all(finding.severity is not Severity.PROBLEM for finding in findings)
    output.show({"conforms": conforms, "findings": findings}, lambda: doctor_view(findings))
    if not conforms:
        raise typer.Exit(Exit.FAILED)


# ---- tandem doctor draft


class DraftServiceOptions(ServiceOptions):
    """How to reach a draft service, and the target that it is for."""

    target: Annotated[str | None, typer.Option(metavar="ADDRESS")] = None
    """Target that it shall draft for, reached in the same way: checks the coordinator's rules for both."""


@command(app, "10.0.0.7:50052", "127.0.0.1:50052 --json", name="doctor draft")
async def doctor_draft(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of the draft service.")],
    service: DraftServiceOptions,
    output: OutputOptions,
) -> None:
    """Play the protocol of draft services against one, ours or another's (docs/protocol.md).

    A line for each check: order, idempotence, rollback, what is stale, malformed or torn, and drafting ahead within its
    budgets. With --target the coordinator's rules for a draft and its target are checked as well. It opens a few short
    sequences; run it against a service that is idle, since batches of several sequences may change a model's ties.
    Exits 0 when all checks pass, 1 when one fails, 2 for a service of another kind, 4 when it cannot be reached.
    """
    # Only where it is asked for
    from tandem_coordinator.transport.conformance.draft import SUITE
    from tandem_coordinator.transport.draft_client import DraftClient

    async with _open_service(address, service) as channel:
        findings = await SUITE.check(channel, service.timeout)
        target = None
        if service.target is not None:
            target = await _target_info(service.target, service)
        findings += model_rules(await DraftClient(channel).model_info(), target)
    _show_conformance(findings, output)


_OF_CONFIGURATION = frozenset({"drafting-method", "configured-max-length"})
"""Rules that only options of the coordinator can break."""


async def _target_info(address: str, service: ServiceOptions) -> ModelInfo:
    from tandem_coordinator.transport.conformance.checks import read_model
    from tandem_coordinator.transport.target_client import TargetClient

    async with _open_service(address, service) as channel:
        return await read_model("target service", TargetClient(channel).model_info(), service.timeout)


def model_rules(draft: ModelInfo, target: ModelInfo | None) -> list[Finding]:
    """A finding for each of the coordinator's rules for a draft and its target, by the default options, and one that
    names the rules that cannot be checked from here."""
    from tandem.config import SpeculativeConfig
    from tandem_coordinator.replicas.compatibility import MODEL_RULES, Deployment, needs_mapping

    findings = []
    unchecked = [rule.name for rule in MODEL_RULES if target is None or rule.name in _OF_CONFIGURATION]
    if target is not None:
        deployment = Deployment(SpeculativeConfig(), target, draft)
        for rule in MODEL_RULES:
            if rule.name in unchecked:
                continue
            if sentences := list(rule.broken_by(deployment)):
                findings.append(
                    Finding.problem(rule.name, "; ".join(sentences), "a coordinator refuses the pair")
                )
            else:
                findings.append(Finding.ok(rule.name, rule.requirement.replace("`", "")))
        if needs_mapping(draft, target):
            unchecked.append("share of the draft's text that the mapping keeps")
    advice = "tandem admin doctor checks them in a running cluster"
    if target is None:
        advice = f"name the draft's target with --target; {advice}"
    words = f"rules of the coordinator that need its options or a target: {', '.join(unchecked)}"
    return [*findings, Finding.warning("not checked", words, advice)]


# ---- tandem doctor target


@command(app, "10.0.0.7:50051", "127.0.0.1:50051 --json", name="doctor target")
async def doctor_target(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of the target service.")],
    service: ServiceOptions,
    output: OutputOptions,
) -> None:
    """Play the protocol of target services against one, ours or another's.

    A line for each check: rows, rollback, seeds, repeated steps, refusals, led rounds and a head of its own. It opens a
    few short sequences; run it against a service that is idle.
    Exits 0 when all checks pass, 1 when one fails, 2 for a service of another kind, 4 when it cannot be reached.
    """
    # Only where it is asked for
    from tandem_coordinator.transport.conformance.target import SUITE

    async with _open_service(address, service) as channel:
        findings = await SUITE.check(channel, service.timeout)
    _show_conformance(findings, output)

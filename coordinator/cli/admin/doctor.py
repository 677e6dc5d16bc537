"""`tandem admin doctor`: finds problems from here and from the coordinator, and says what to do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli.admin.client import admin_client
from coordinator.cli.admin.views import milliseconds, plural
from coordinator.cli.command import UNHEALTHY, UNREACHABLE, OutputOptions, command, exit_code
from coordinator.cli.connection import Connection, ConnectionOptions, connect
from tandem import __version__
from tandem.admin import Diagnosis, Finding, Severity
from tandem.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient
from tandem.errors import PermissionDeniedError, ServiceUnavailableError, TandemError, UnauthenticatedError
from tandem.rpc.addresses import is_local

_PINGS = 5
SKEW_SECONDS = 1.0
"""Clocks that differ by more make logs and traces of two machines hard to read together."""
FAR_SECONDS = 0.2
"""A round trip to the coordinator that a person notices at the start of each answer."""

_MARKS = {
    Severity.OK: Text("✓", style="green"),
    Severity.WARNING: Text("!", style="bold yellow"),
    Severity.PROBLEM: Text("✗", style="bold red"),
}


@dataclass(slots=True)
class Report:
    """The findings."""

    findings: list[Finding] = field(default_factory=list)
    exit_code: int = 0

    @property
    def healthy(self) -> bool:
        """True if requests can be completed."""
        return self.exit_code == 0

    def add(self, finding: Finding) -> None:
        """Note a finding."""
        self.findings.append(finding)
        if finding.severity is Severity.PROBLEM:
            self.exit_code = self.exit_code or UNHEALTHY


def add_to(admin: typer.Typer) -> None:
    """Add the command to its group."""
    command(admin, "tandem admin doctor", "tandem admin doctor -o json")(doctor)


async def doctor(click: typer.Context, connection: ConnectionOptions, output: OutputOptions) -> None:
    """Find problems, and say what to do.

    Checks the address, TLS, the token, versions, clocks and round trips from here, and replicas, models, load and
    acceptance from the coordinator. Exits 0 without a problem (warnings do not count), 3 with one, 4 when the
    coordinator cannot be reached, and 5 when it refuses the token.
    """
    where = connect(connection, click)
    async with admin_client(connection, click) as client:
        report = await examine(where, client)
    output.show({"healthy": report.healthy, "findings": report.findings}, lambda: view(report.findings))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


async def examine(where: Connection, client: AdminClient) -> Report:
    """Everything that can be found."""
    report = Report()
    reached = await _reached(where.address, where.timeout_seconds or DEFAULT_TIMEOUT_SECONDS)
    report.add(reached)
    if reached.severity is Severity.PROBLEM:
        report.exit_code = UNREACHABLE
        return report
    report.add(transport(where))
    try:
        round_trip = await _round_trip(client)
        before = datetime.now().astimezone()
        began = time.perf_counter()
        diagnosis = await client.diagnose()
        took = time.perf_counter() - began
    except TandemError as error:
        report.add(refused(where, error))
        report.exit_code = exit_code(error)
        return report
    report.add(distance(round_trip))
    report.add(version(diagnosis))
    report.add(clock(before, took, diagnosis.time))
    for finding in diagnosis.findings:
        report.add(finding)
    return report


async def _reached(address: str, seconds: float) -> Finding:
    """True if anything listens there."""
    if address.startswith("unix:"):
        return Finding("address", address, Severity.OK, "a socket of this machine")
    host, _, port = address.rpartition(":")
    began = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Finding(
            "address",
            address,
            Severity.PROBLEM,
            f"it cannot be reached: {reason}",
            "start the coordinator there, or name another with --address or tandem context use",
        )
    took = milliseconds(time.perf_counter() - began)
    return Finding("address", address, Severity.OK, f"it accepts connections, within {took}")


async def _round_trip(client: AdminClient) -> float:
    """The shortest of a few, seconds; the first of them opens the connection."""
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        await client.is_serving()
        times.append(time.perf_counter() - began)
    return min(times)


def transport(where: Connection) -> Finding:
    """True if others can listen."""
    if where.credentials.uses_tls:
        return Finding("TLS", "", Severity.OK, "the connection is encrypted")
    if is_local(where.address):
        return Finding("TLS", "", Severity.OK, "plain text, within this machine")
    return Finding(
        "TLS",
        "",
        Severity.WARNING,
        "prompts, completions and the token travel in plain text",
        "start the coordinator with --tls-cert-file and --tls-key-file, and give --tls-ca-file here",
    )


def refused(where: Connection, error: TandemError) -> Finding:
    """Reason why the coordinator could not be asked, though it is there."""
    advice = ""
    check = "answer"
    if isinstance(error, UnauthenticatedError | PermissionDeniedError):
        check, advice = "token", "give the coordinator's admin token with --token-file"
    elif isinstance(error, ServiceUnavailableError):
        advice = (
            "check --tls-ca-file and --tls-server-name, and whether it speaks TLS at all"
            if where.credentials.uses_tls
            else "if it speaks TLS, give --tls or --tls-ca-file; else it may not be a coordinator"
        )
    return Finding(check, where.address, Severity.PROBLEM, str(error), advice)


def distance(seconds: float) -> Finding:
    """How far away the coordinator is."""
    words = f"{milliseconds(seconds)} from here to the coordinator and back"
    if seconds <= FAR_SECONDS:
        return Finding("round trip", "", Severity.OK, words)
    return Finding("round trip", "", Severity.WARNING, words, "each answer begins that much later")


def version(diagnosis: Diagnosis) -> Finding:
    """True if the two ends are of one release."""
    if diagnosis.version == __version__:
        return Finding("version", "", Severity.OK, f"{__version__} here and there")
    return Finding(
        "version",
        "",
        Severity.WARNING,
        f"{__version__} here, {diagnosis.version} there",
        f"install tandem {diagnosis.version} here, or upgrade the coordinator",
    )


def clock(before: datetime, took: float, coordinator_time: datetime) -> Finding:
    """Difference of the two clocks, assuming that the coordinator read its own halfway through the call.

    Args:
        before: Our clock when the call began.
        took: Duration of the call, in seconds.
        coordinator_time: The coordinator's clock.
    """
    apart = abs((coordinator_time - before).total_seconds() - took / 2)
    words = f"{milliseconds(apart)} apart, give or take {milliseconds(took / 2)}"
    if apart - took / 2 <= SKEW_SECONDS:
        return Finding("clock", "", Severity.OK, words)
    return Finding(
        "clock",
        "",
        Severity.WARNING,
        f"{apart:.1f} s apart: logs and traces of the two machines do not fit together",
        "synchronise the clocks of both machines (NTP)",
    )


def view(findings: Sequence[Finding]) -> RenderableType:
    """All findings, each with what to do, and how many there are of each kind."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(_MARKS[finding.severity], finding.check, "\n".join(_lines(finding)))
    return Group(table, "", summary(findings))


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.subject}: {finding.detail}" if finding.subject else finding.detail
    if finding.advice:
        yield f"→ {finding.advice}"


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each kind."""
    counts = Counter(finding.severity for finding in findings)
    return (
        f"{plural(len(findings), 'check')}: {counts[Severity.OK]} fine, "
        f"{plural(counts[Severity.WARNING], 'warning')}, {plural(counts[Severity.PROBLEM], 'problem')}"
    )

"""`tandem doctor draft`: plays the protocol of draft services against one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.app import Exit
from coordinator.cli.command import OutputForm, OutputOptions, command, option
from coordinator.cli.doctor import doctor_view
from coordinator.transport.conformance import conformance
from tandem.admin import Severity
from tandem.rpc.channels import DEFAULT_MESSAGE_LIMIT_BYTES, open_channel
from tandem.rpc.credentials import Credentials


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How to reach a service. No context is asked: these belong to coordinators, and so do their tokens."""

    tls: bool = option("Connect by TLS.", "--tls", default=False)
    tls_ca_file: Path | None = option("PEM file of the authorities to trust; implies --tls.")
    tls_cert_file: Path | None = option("PEM file of your own certificate, for mutual TLS.")
    tls_key_file: Path | None = option("PEM file of its key.")
    tls_server_name: str = option("Name in the service's certificate, where not the address's.", default="")
    token_file: Path | None = option("File whose first line is the service's token.")
    timeout: float = option("Seconds that an answer may take.", default=10.0, min=0.1)


def add_to(app: typer.Typer) -> None:
    """Add the command to its group."""
    command(
        app,
        "tandem doctor draft 10.0.0.7:50052",
        "tandem doctor draft 127.0.0.1:50052 --json",
        name="doctor draft",
    )(doctor_draft)


async def doctor_draft(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of the draft service.")],
    service: ServiceOptions,
    output: OutputOptions,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
) -> None:
    """Play the protocol of draft services against one, ours or another's (docs/protocol.md).

    A line for each check: order, idempotence, rollback, what is stale, malformed or torn, and drafting ahead within its
    budgets. It opens a few short sequences; run it against a service that is idle, since batches of several sequences
    may change a model's ties. Exits 0 when all checks pass, 1 when one fails, 4 when the service cannot be reached.
    """
    credentials = Credentials.of(asdict(service))
    async with open_channel(address, DEFAULT_MESSAGE_LIMIT_BYTES, credentials) as channel:
        findings = await conformance(channel, service.timeout)
    conforms = all(finding.severity is not Severity.PROBLEM for finding in findings)
    if as_json:
        output = OutputOptions(OutputForm.JSON)
    output.show({"conforms": conforms, "findings": findings}, lambda: doctor_view(findings))
    if not conforms:
        raise typer.Exit(Exit.FAILED)

"""`tandem audit`: is a server's speculative decoding lossless?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tandem.errors import ConfigurationError
from tandem.progress import Progress
from tandem_coordinator.cli.command import command, option, plain_table, print_parts
from tandem_coordinator.cli.main import Exit, app

if TYPE_CHECKING:
    from tandem.audit.run import Audit


@dataclass(frozen=True)
class AuditArguments:
    """The server to audit, and the budget."""

    url: Annotated[str, typer.Argument(help="OpenAI's API of the server: http://HOST:PORT/v1.")] = ""
    model: str | None = option("Model to ask for. [default: the first one that the server lists]")
    reference: str | None = option("The same model without speculation, or before an upgrade: its URL.")
    reference_model: str | None = option(
        "Model to ask the reference for. [default: the first one that it lists]"
    )
    minutes: float = option(
        "Maximum minutes; the first checks always run to their end.", default=10.0, min=0.0
    )
    concurrency: int = option("Maximum requests at once.", default=8, min=1)
    max_tokens: int = option("Tokens of each sampled completion.", default=64, min=1)
    budget_requests: int = option("Maximum requests in all.", default=20_000, min=1)
    budget_tokens: int = option("Maximum generated tokens in all.", default=500_000, min=1)
    num_speculative_tokens: int | None = option(
        "Tokens that the server proposes at once. [default: what its metrics show]", min=1
    )
    body: str | None = option("Extra fields of each request, as a JSON object.", metavar="JSON")
    reference_body: str | None = option("The same for the reference.", metavar="JSON")
    as_json: bool = option("Print the result as JSON.", "--json", default=False)
    html: Path | None = option("Write a report with pictures to this file.")
    quiet: bool = option("Show no progress.", "--quiet", "-q", default=False)


@command(
    app,
    "http://127.0.0.1:8000/v1 --minutes 2",
    "http://127.0.0.1:8000/v1 --html audit.html --json > audit.json",
    "http://new:8000/v1 --reference http://old:8000/v1",
    """http://127.0.0.1:8000/v1 --body '{"rejection_sampling_strategy": "block"}'""",
)
async def audit(arguments: AuditArguments) -> None:
    """Check whether an OpenAI-compatible server's speculative decoding is lossless.

    Samples tokens and tests them against the log probabilities that the server itself reports, and asks the same things
    in several ways. Exits with 1 if it has a finding. docs/audit.md explains the tests.

    A key is read from TANDEM_AUDIT_KEY, else OPENAI_API_KEY; the reference's from TANDEM_AUDIT_REFERENCE_KEY.
    """
    if not arguments.url:
        raise ConfigurationError("URL is missing; give the server's, such as http://127.0.0.1:8000/v1")
    try:
        from tandem.audit.report import as_dict, html
        from tandem.audit.run import AuditOptions
        from tandem.audit.run import audit as run_audit
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed, and tandem audit needs it: pip install 'tandem-speculative[audit]'"
        ) from None
    given = asdict(arguments) | {
        "body": _object("--body", arguments.body),
        "reference_body": _object("--reference-body", arguments.reference_body),
        "key": os.environ.get("TANDEM_AUDIT_KEY") or os.environ.get("OPENAI_API_KEY"),
        "reference_key": os.environ.get("TANDEM_AUDIT_REFERENCE_KEY"),
    }
    names = {each.name for each in fields(AuditOptions)} & given.keys()
    options = AuditOptions(**{name: given[name] for name in names})
    if arguments.quiet:
        result = await run_audit(options)
    else:
        with Progress("tandem audit", sys.stderr) as progress:
            result = await run_audit(options, progress.show)
    if arguments.html is not None:
        try:
            arguments.html.write_text(html(result), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--html {arguments.html} cannot be written: {error}") from None
    if arguments.as_json:
        sys.stdout.write(json.dumps(as_dict(result), indent=2, ensure_ascii=False) + "\n")
    else:
        show(result)
    sys.stdout.flush()
    raise typer.Exit(Exit.FAILED if result.findings else Exit.OK)


def _object(name: str, words: str | None) -> Mapping[str, Any]:
    if words is None:
        return {}
    try:
        value = json.loads(words)
    except ValueError as error:
        raise ConfigurationError(f"{name} is {words!r}, which is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} is {words!r}; it must be a JSON object")
    return value


def show(result: Audit) -> None:
    """Print the checks, the strongest tests, and the verdict with its findings."""
    from tandem.audit.report import acceptance_line, strongest
    from tandem.audit.statistics import LEVEL

    checks = plain_table("CHECK", "RESULT", "DETAIL")
    for each in result.checks:
        checks.add_row(each.name, each.verdict.value, each.detail)
    parts: list[Table | str] = [checks]
    if result.tests:
        tests = plain_table("TEST", "LOOK", ">TOKENS", ">EXCESS", ">Z", ">P, CORRECTED")
        for look, test in strongest(result):
            corrected = "-" if test.adjusted_p is None else f"{test.adjusted_p:.2g}"
            numbers = (f"{test.tokens:,}", f"{test.excess:+.4f}", f"{test.z:+.2f}", corrected)
            tests.add_row(test.name, look, *numbers)
        evidence = f"evidence 10^{result.max_log10:.1f} at most; from 10^{LEVEL:.1f} on it is a finding"
        parts += ["", tests, evidence]
    if result.reference:
        reference = plain_table("AGAINST THE REFERENCE", ">COUNTED", ">P, CORRECTED")
        for test in result.reference:
            reference.add_row(test.name, f"{test.tokens:,}", f"{test.adjusted_p:.2g}")
        parts += ["", reference]
    if words := acceptance_line(result):
        parts += ["", f"speculation: {words}"]
    if result.detectable is not None:
        parts += [f"a first choice taken {result.detectable:.1%} too often would have been found with 95 %"]
    parts += ["", f"{result.url}: {result.verdict}", *(f"- {finding}" for finding in result.findings)]
    print_parts(*parts)

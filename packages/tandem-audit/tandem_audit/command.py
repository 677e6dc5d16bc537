"""The command line: `tandem-audit`, and `tandem audit` where Tandem is installed as well."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem_audit import __version__
from tandem_audit.errors import AuditError, UsageError
from tandem_audit.progress import show_progress
from tandem_audit.report import acceptance_line, as_dict, html, strongest
from tandem_audit.run import Audit, AuditOptions
from tandem_audit.run import audit as run_audit
from tandem_audit.statistics import LEVEL

_EXAMPLES = (
    "http://127.0.0.1:8000/v1 --minutes 2",
    "http://127.0.0.1:8000/v1 --html audit.html --json > audit.json",
    "http://new:8000/v1 --reference http://old:8000/v1",
    """http://127.0.0.1:8000/v1 --body '{"rejection_sampling_strategy": "block"}'""",
)
_app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None, program: str = "tandem-audit") -> int:
    """Audit a server, and return the exit code. `arguments` are by default the command's own, and `program` is how a
    user calls it."""
    words = None if arguments is None else list(arguments)
    try:
        code = _app(words, prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        message = error.format_message()
        return _fail(f"{message[:1].lower()}{message[1:].rstrip('.')}", error.exit_code)
    except AuditError as error:
        return _fail(str(error), error.exit_code)
    except typer.Abort:
        return 1
    return code if isinstance(code, int) else 0


def _fail(sentence: str, code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return code


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        _write(f"tandem-audit {__version__}\n")
        raise typer.Exit


def _option(help_text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help_text, **more)


# \b keeps the lines of a paragraph as they are.
_HELP = "\n".join(
    [
        "Check whether an OpenAI-compatible server's speculative decoding is lossless.",
        "",
        "Samples tokens and tests them against the log probabilities that the server itself reports, and asks the same "
        "things in several ways. Exits with 1 if it has a finding.",
        "",
        "A key is read from TANDEM_AUDIT_KEY, else OPENAI_API_KEY; the reference's from TANDEM_AUDIT_REFERENCE_KEY.",
        "",
        "\b",
        "Examples:",
        *(f"  tandem-audit {each}" for each in _EXAMPLES),
    ]
)


@_app.command(help=_HELP)
def audit(
    *,
    url: Annotated[str, typer.Argument(help="OpenAI's API of the server: http://HOST:PORT/v1.")] = "",
    model: Annotated[
        str | None, _option("Model to ask for. [default: the first one that the server lists]")
    ] = None,
    reference: Annotated[
        str | None, _option("The same model without speculation, or before an upgrade: its URL.")
    ] = None,
    reference_model: Annotated[
        str | None, _option("Model to ask the reference for. [default: the first one that it lists]")
    ] = None,
    minutes: Annotated[
        float, _option("Maximum minutes; the first checks always run to their end.", min=0.0)
    ] = 10.0,
    concurrency: Annotated[int, _option("Maximum requests at once.", min=1)] = 8,
    max_tokens: Annotated[int, _option("Tokens of each sampled completion.", min=1)] = 64,
    budget_requests: Annotated[int, _option("Maximum requests in all.", min=1)] = 20_000,
    budget_tokens: Annotated[int, _option("Maximum generated tokens in all.", min=1)] = 500_000,
    num_speculative_tokens: Annotated[
        int | None,
        _option("Tokens that the server proposes at once. [default: what its metrics show]", min=1),
    ] = None,
    body: Annotated[
        str | None, _option("Extra fields of each request, as a JSON object.", metavar="JSON")
    ] = None,
    reference_body: Annotated[str | None, _option("The same for the reference.", metavar="JSON")] = None,
    as_json: Annotated[bool, _option("Print the result as JSON.", "--json")] = False,
    html_file: Annotated[
        Path | None, _option("Write a report with pictures to this file.", "--html", metavar="FILE")
    ] = None,
    quiet: Annotated[bool, _option("Show no progress.", "--quiet", "-q")] = False,
    version: Annotated[
        bool, _option("Print the version.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Audit a server as the options say, and show the result."""
    del version  # printed before
    if not url:
        raise UsageError("URL is missing; give the server's, such as http://127.0.0.1:8000/v1")
    options = AuditOptions(
        url,
        model=model,
        reference=reference,
        minutes=minutes,
        concurrency=concurrency,
        max_tokens=max_tokens,
        budget_requests=budget_requests,
        budget_tokens=budget_tokens,
        num_speculative_tokens=num_speculative_tokens,
        body=_object("--body", body),
        reference_model=reference_model,
        reference_body=_object("--reference-body", reference_body),
    )
    options = replace(
        options,
        key=os.environ.get("TANDEM_AUDIT_KEY") or os.environ.get("OPENAI_API_KEY"),
        reference_key=os.environ.get("TANDEM_AUDIT_REFERENCE_KEY"),
    )
    with _reports(quiet) as report:
        result = asyncio.run(run_audit(options, report))
    if html_file is not None:
        try:
            html_file.write_text(html(result), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {html_file} cannot be written: {error}") from None
    if as_json:
        _write(json.dumps(as_dict(result), indent=2, ensure_ascii=False) + "\n")
    else:
        _write(format_audit(result))
    raise typer.Exit(1 if result.findings else 0)


@contextmanager
def _reports(is_quiet: bool) -> Iterator[Callable[[str, float], None]]:
    if is_quiet:
        yield lambda words, share: None
        return
    with show_progress(sys.stderr) as report:
        yield report


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python would write what is left in the buffer again when it ends, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(1) from None
        raise AuditError(f"stdout cannot be written: {(error.strerror or str(error)).lower()}") from None


def _object(name: str, words: str | None) -> Mapping[str, Any]:
    if words is None:
        return {}
    try:
        value = json.loads(words)
    except ValueError as error:
        raise UsageError(f"{name} is {words!r}, which is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {words!r}; it must be a JSON object")
    return value


def format_audit(result: Audit) -> str:
    """The checks, the strongest tests, and the verdict with its findings, for a person."""
    lines = _table(
        ("CHECK", "RESULT", "DETAIL"),
        ((each.name, each.verdict.value, each.detail) for each in result.checks),
    )
    if result.tests:
        rows = []
        for look, test in strongest(result):
            corrected = "-" if test.adjusted_p is None else f"{test.adjusted_p:.2g}"
            numbers = (f"{test.tokens:,}", f"{test.excess:+.4f}", f"{test.z:+.2f}", corrected)
            rows.append((test.name, look, *numbers))
        lines += ["", *_table(("TEST", "LOOK", ">TOKENS", ">EXCESS", ">Z", ">P, CORRECTED"), rows)]
        lines.append(f"evidence 10^{result.max_log10:.1f} at most; from 10^{LEVEL:.1f} on it is a finding")
    if result.reference:
        compared = ((test.name, f"{test.tokens:,}", f"{test.adjusted_p:.2g}") for test in result.reference)
        lines += ["", *_table(("AGAINST THE REFERENCE", ">COUNTED", ">P, CORRECTED"), compared)]
    if words := acceptance_line(result):
        lines += ["", f"speculation: {words}"]
    if result.detectable is not None:
        lines.append(
            f"a first choice taken {result.detectable:.1%} too often would have been found with 95 %"
        )
    lines += ["", f"{result.url}: {result.verdict}", *(f"- {finding}" for finding in result.findings)]
    return "".join(f"{line}\n" for line in lines)


def _table(names: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table. A column whose name begins with > is aligned to the right."""
    cells = [[name.removeprefix(">") for name in names], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(width) if name.startswith(">") else cell.ljust(width)
            for name, cell, width in zip(names, row, widths, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines

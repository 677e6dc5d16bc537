"""`tandem admin`: see and steer a coordinator that runs."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from coordinator.cli import views
from coordinator.cli.app import Exit, new_app
from coordinator.cli.command import OutputForm, OutputOptions, command, option
from coordinator.cli.connection import Connection, ConnectionOptions, connect
from coordinator.cli.doctor import doctor_view, examine
from tandem import errors
from tandem.admin_client import DEFAULT_TIMEOUT_SECONDS, AdminClient
from tandem.plural import plural
from tandem.replica import ReplicaState, Role, is_last_target, replica_at

verbs = new_app("")
admin = new_app(
    "Inspect and control a running coordinator.\n\n"
    "Every command takes --output table, json or yaml, and the options of the connection: on the command line, in the "
    "environment (TANDEM_CLIENT_ADDRESS and so on) or from a context (tandem context --help).\n\n"
    "\b\nExit codes:\n  0  done\n  1  failed\n  2  wrong usage\n  3  unhealthy\n  4  not reachable\n  5  refused"
)
verbs.add_typer(admin, name="admin")
replicas = new_app("List, show, drain and resume replicas.")
requests = new_app("List, show and abort running requests.")
config = new_app("Show and change the live configuration.")

WAIT_SECONDS = 60.0
"""Of `health --wait` without --timeout: longer than the demo's models take to load."""


class Answer(NamedTuple):
    """The result of a verb, and the command's exit code."""

    result: object
    """For programs."""
    view: Callable[..., RenderableType]
    """Shows the result to people; with `compares` also what changed since an earlier one."""
    exit_code: int = 0
    compares: bool = False

    def table(self, before: Answer | None = None) -> RenderableType:
        earlier = [before.result] if self.compares and before else []
        return self.view(self.result, *earlier)


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Looks at a coordinator that go on."""

    watch: bool = option("Go on until Ctrl-C.", "--watch", "-w", default=False)
    interval: float = option("With --watch: seconds between two looks.", default=1.0)
    count: int | None = option("With --watch: end after so many looks.", min=1)

    async def show(self, ask: Callable[[], Awaitable[Answer]], output: OutputOptions) -> None:
        """Ask and show, again and again: a terminal updates its table, elsewhere the looks follow each other."""
        screen = Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop")
        is_screen = output.form is OutputForm.TABLE and sys.stdout.isatty()
        before: Answer | None = None
        with screen if is_screen else nullcontext():
            for look in itertools.count() if self.count is None else range(self.count):
                if look:
                    await asyncio.sleep(self.interval)
                answer = await ask()
                if is_screen:
                    screen.update(answer.table(before), refresh=True)
                else:
                    output.show(answer.result, partial(answer.table, before), is_one_of_many=True)
                before = answer


def verb(
    app: typer.Typer, *examples: str, name: str | None = None, can_watch: bool = False
) -> Callable[[Any], Any]:
    """Add a function to an app as a command that asks a coordinator and prints an `Answer`.

    Its first parameter is the client, its second may be `where: Connection`; the others are the command's own. One that
    `can_watch` has --watch.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        parameters.pop("client")
        needs_where = parameters.pop("where", None) is not None

        async def run(
            click: typer.Context,
            connection: ConnectionOptions,
            output: OutputOptions,
            watching: WatchOptions = WatchOptions(),
            **own: Any,
        ) -> None:
            where = connect(connection, click)
            if needs_where:
                own["where"] = where
            async with admin_client(where) as client:
                if watching.watch:
                    await watching.show(partial(function, client, **own), output)
                    return
                answer: Answer = await function(client, **own)
            output.show(answer.result, answer.table)
            if answer.exit_code:
                raise typer.Exit(answer.exit_code)

        shared = list(inspect.signature(run, eval_str=True).parameters.values())[: 4 if can_watch else 3]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=each.KEYWORD_ONLY) for each in (*parameters.values(), *shared)]
        )
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        command(app, *examples, name=name)(run)
        return function

    return add


def admin_client(where: Connection) -> AdminClient:
    """A client for the coordinator at the other end of a connection."""
    return AdminClient(where.address, where.credentials, where.timeout_seconds or DEFAULT_TIMEOUT_SECONDS)


def _suggesting(
    ask: Callable[[AdminClient], Awaitable[Iterable[tuple[str, str]]]],
) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Complete a word in the shell. A suggestion that fails must never disturb the shell."""

    def suggest(click: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        async def answer() -> list[tuple[str, str]]:
            names = [field.name for field in fields(ConnectionOptions) if field.name in click.params]
            where = connect(ConnectionOptions(**{name: click.params[name] for name in names}), click)
            # A shell that completes a word does not wait longer for a coordinator
            async with AdminClient(where.address, where.credentials, 1.0) as client:
                return [entry for entry in await ask(client) if entry[0].startswith(incomplete)]

        try:
            return asyncio.run(answer())
        except errors.TandemError:
            return []

    return suggest


async def _replica_addresses(client: AdminClient) -> list[tuple[str, str]]:
    return [(shot.address, f"{shot.role.value}, {shot.state.value}") for shot in await client.replicas()]


async def _request_ids(client: AdminClient) -> list[tuple[str, str]]:
    return [(each.request_id, plural(each.completion_tokens, "token")) for each in await client.requests()]


Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        help="host:port, as in the list.",
        autocompletion=_suggesting(_replica_addresses),
    ),
]
RequestId = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The request's id, or its beginning.", autocompletion=_suggesting(_request_ids)
    ),
]


@verb(admin, "tandem admin status -w", "tandem admin status --address 10.0.0.5:50051 -o json", can_watch=True)
async def status(client: AdminClient) -> Answer:
    """Show replicas, load, acceptance and throughput."""
    return Answer(await client.status(), lambda found: views.status_view(found, client.address))


admin.add_typer(replicas, name="replicas")


@verb(
    replicas,
    "tandem admin replicas list -w",
    "tandem admin replicas list -o yaml",
    name="list",
    can_watch=True,
)
async def list_replicas(client: AdminClient) -> Answer:
    """List replicas with state, load and acceptance."""
    return Answer(await client.replicas(), views.replicas_view)


@verb(replicas, "tandem admin replicas show 10.0.0.7:50053", name="show")
async def show_replica(client: AdminClient, replica: Address) -> Answer:
    """Show a replica and its model."""
    return Answer(replica_at(await client.replicas(), replica), views.replica_view)


@verb(
    replicas, "tandem admin replicas drain 10.0.0.7:50053", "tandem admin replicas drain 10.0.0.7:50053 --yes"
)
async def drain(
    client: AdminClient,
    replica: Address,
    yes: Annotated[bool, typer.Option("--yes", help="Drain the last target without asking.")] = False,
) -> Answer:
    """Stop sending new sequences to a replica.

    Its own sequences move to another one, or finish there. Without any other target requests wait and then fail, so
    draining the last one needs confirmation.
    """
    known = await client.replicas()
    is_last = is_last_target(replica_at(known, replica), known)
    if is_last and not yes:
        what = f"{replica} is the last target that takes new sequences"
        if not sys.stdin.isatty():
            raise errors.ConfigurationError(f"{what}; to drain it all the same, give --yes")
        # On stderr, since stdout is for the result.
        sys.stderr.write(f"{what}: requests will wait and then fail. Drain it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise errors.TandemError("nothing was drained")
    drained = await client.drain(replica, allow_last_target=is_last)
    return Answer(drained, lambda found: views.replica_table([found]))


@verb(replicas, "tandem admin replicas resume 10.0.0.7:50053")
async def resume(client: AdminClient, replica: Address) -> Answer:
    """Give a drained replica new sequences again."""
    return Answer(await client.resume(replica), lambda found: views.replica_table([found]))


admin.add_typer(requests, name="requests")


@verb(requests, "tandem admin requests list -w", name="list", can_watch=True)
async def list_requests(client: AdminClient) -> Answer:
    """List running requests, the oldest first."""
    return Answer(await client.requests(), views.requests_view)


@verb(requests, "tandem admin requests show 3f9c", name="show")
async def show_request(client: AdminClient, request_id: RequestId) -> Answer:
    """Show a running request in detail."""
    return Answer(await client.request(request_id), views.request_view)


@verb(requests, "tandem admin requests abort 3f9c --reason 'making room'")
async def abort(
    client: AdminClient,
    request_id: RequestId,
    reason: Annotated[str, typer.Option(help="Reason for its client.")] = "",
) -> Answer:
    """End a running request. Its client gets the status ABORTED and the reason; every service frees it."""
    return Answer(await client.abort(request_id, reason), lambda ended: views.requests_view([ended]))


@verb(
    admin,
    "tandem admin stats",
    "tandem admin stats --watch --interval 2",
    "tandem admin stats --watch --count 10 -o json",
    can_watch=True,
)
async def stats(client: AdminClient) -> Answer:
    """Show what speculation did; --watch repeats it.

    The statistics begin with the coordinator's start. --watch updates them until Ctrl-C, and shows acceptance at each
    position since the last update. With it, JSON is one object per line and YAML one document per update.

    ACC. LENGTH is MAX's: accepted tokens per verification. MEAN LENGTH is vLLM's mean acceptance length: it counts only
    verifications with a proposal, and the target's own token.
    """
    return Answer(await client.stats(), views.stats_view, compares=True)


admin.add_typer(config, name="config")


@verb(
    config,
    "tandem admin config show",
    "tandem admin config show num_speculative_tokens",
    "tandem admin config show --live -o json",
    name="show",
)
async def show_options(
    client: AdminClient,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these options.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Only options that can be changed.")] = False,
) -> Answer:
    """Show every option, its value, and where the value comes from."""
    options = await client.config()
    names = [key.replace("-", "_") for key in keys or ()]
    unknown = [name for name in names if all(option.name != name for option in options)]
    if unknown:
        raise errors.NotFoundError(f"there is no option {', '.join(unknown)}")
    shown = [
        option for option in options if (not names or option.name in names) and (option.is_live or not live)
    ]
    return Answer(shown, views.options_view)


@verb(
    config,
    "tandem admin config set num_speculative_tokens 6",
    "tandem admin config set speculation false",
    "tandem admin config set rejection_sampling_strategy synthetic synthetic_acceptance_rate 0.7",
    name="set",
)
async def set_options(
    client: AdminClient,
    words: Annotated[list[str], typer.Argument(metavar="KEY VALUE...", help="Options and their values.")],
) -> Answer:
    """Change options for new requests; running requests keep theirs.

    Several options change together or not at all. null unsets an optional option. The coordinator checks the same rules
    as at its start, and logs each change with its caller.
    """
    return Answer(await client.update_config(pairs(words)), views.options_view)


@verb(config, "tandem admin config reset num_speculative_tokens", name="reset")
async def reset_options(
    client: AdminClient,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Options.")],
) -> Answer:
    """Give options the values again that the coordinator started with."""
    return Answer(await client.update_config({}, keys), views.options_view)


def pairs(words: Sequence[str]) -> dict[str, str]:
    """KEY VALUE KEY VALUE ..., or KEY=VALUE."""
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        try:
            found[key] = value if equals else next(rest)
        except StopIteration:
            raise errors.ConfigurationError(
                f"{key} has no value; give KEY VALUE, or several of such pairs"
            ) from None
    return found


@verb(admin, "tandem admin health", "tandem admin health --wait --timeout 120 && tandem generate 'Hello'")
async def health(
    client: AdminClient,
    where: Connection,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help=f"Ask until it is healthy, for --timeout seconds. [default: {WAIT_SECONDS:g}]"
        ),
    ] = False,
) -> Answer:
    """Check whether requests can be completed.

    Exits 0 when they can, 3 when they cannot, 4 when the coordinator cannot be reached. Where an admin token is needed
    but missing, the command uses the standard health protocol.
    """
    deadline = time.monotonic() + (where.timeout_seconds or WAIT_SECONDS if wait else 0.0)
    while True:
        try:
            answer = await _health(client)
            if answer.exit_code == Exit.OK or time.monotonic() > deadline:
                return answer
        except errors.ServiceUnavailableError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


async def _health(client: AdminClient) -> Answer:
    healthy = serving = await client.is_serving()
    words = ["serving" if serving else "not serving"]
    # Empty where the token does not permit asking.
    known: dict[str, Any] = {"state": "", "targets_ready": None, "drafts_ready": None}
    with suppress(errors.UnauthenticatedError, errors.PermissionDeniedError):
        status = await client.status()
        healthy = serving and status.state.completes
        ready = [shot.role for shot in status.replicas if shot.state is ReplicaState.READY]
        targets, drafts = ready.count(Role.TARGET), ready.count(Role.DRAFT)
        known = {"state": status.state.value, "targets_ready": targets, "drafts_ready": drafts}
        words = [status.state.value, *([] if serving else words)]
        words += [f"{plural(targets, 'target')} ready", f"{plural(drafts, 'draft')} ready"]
    told = f"{'healthy' if healthy else 'unhealthy'}: {', '.join(words)}"
    report = {"healthy": healthy, "serving": serving, **known}
    return Answer(report, lambda _: told, Exit.OK if healthy else Exit.UNHEALTHY)


@verb(admin, "tandem admin doctor", "tandem admin doctor -o json")
async def doctor(client: AdminClient, where: Connection) -> Answer:
    """Find problems, and suggest remedies.

    Checks the address, TLS, the token, versions, clocks and round trips from here, and replicas, models, load and
    acceptance from the coordinator. Exits 0 without a problem (warnings do not count), 3 with one, 4 when the
    coordinator cannot be reached, and 5 when it refuses the token.
    """
    findings, exit_code = await examine(where, client)
    report = {"healthy": exit_code == 0, "findings": findings}
    return Answer(report, lambda _: doctor_view(findings), exit_code)

"""`tandem admin`: see and steer a coordinator that runs."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict, TypeVar

import typer
from pydantic import Field, ValidationError
from rich.console import Console, RenderableType
from rich.live import Live

from tandem import errors
from tandem.clients.admin_client import AdminClient
from tandem.clients.weights_client import CHANGE_TIMEOUT_SECONDS
from tandem.model.admin import ConfigOption, Stats
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role, is_last_target, replica_at
from tandem.model.types import InFlight, Weights
from tandem.rpc.credentials import Credentials
from tandem.serving.standard_streams import write_error
from tandem.telemetry.progress import Progress
from tandem_coordinator.cli import views
from tandem_coordinator.cli.command import OutputOptions, command
from tandem_coordinator.cli.connection import Connection
from tandem_coordinator.cli.doctor import doctor_view, examine
from tandem_coordinator.cli.main import CommandGroup, Exit, app

admin = CommandGroup(
    "Inspect and control a running coordinator.\n\n"
    "Every command takes --output table, json or yaml, and the options of the connection: on the command line, in the "
    "environment (TANDEM_CLIENT_ADDRESS and so on) or from a context (tandem context --help).\n\n"
    "\b\nExit codes:\n  0  done\n  1  failed\n  2  wrong usage\n  3  unhealthy\n  4  not reachable\n  5  refused",
    app,
    "admin",
)
replicas = CommandGroup("List, show, drain and resume replicas.", admin, "replicas")
requests = CommandGroup("List, show and abort running requests.", admin, "requests")
config = CommandGroup("Show and change the live configuration.", admin, "config")
weights = CommandGroup("Replace the weights of targets or drafts while they run.", admin, "weights")

WAIT_SECONDS = 60.0
"""Of `health --wait` without --timeout: longer than the demo's models take to load."""

ResultT = TypeVar("ResultT")


class Query(OutputOptions, Connection):
    """The coordinator that is asked, and the form of its answer."""

    async def answer(
        self, ask: Callable[[AdminClient], Awaitable[ResultT]], view: Callable[[ResultT], RenderableType]
    ) -> None:
        """Ask and show, to people as `view` says."""
        async with self.admin_client() as client:
            result = await ask(client)
        self.show(result, partial(view, result))


class WatchQuery(Query):
    """A query that may go on."""

    watch: Annotated[bool, typer.Option("--watch", "-w")] = False
    """Go on until Ctrl-C."""
    interval: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """With --watch: seconds between two looks."""
    count: int | None = Field(default=None, ge=1)
    """With --watch: end after so many looks."""

    async def answer(
        self, ask: Callable[[AdminClient], Awaitable[ResultT]], view: Callable[[ResultT], RenderableType]
    ) -> None:
        """Ask and show, with --watch again and again: a terminal updates its table, elsewhere the looks follow."""
        if not self.watch:
            await super().answer(ask, view)
            return
        screen = Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop")
        is_screen = self.form == "table" and sys.stdout.isatty()
        async with self.admin_client() as client:
            with screen if is_screen else nullcontext():
                for look in itertools.count() if self.count is None else range(self.count):
                    if look:
                        await asyncio.sleep(self.interval)
                    result = await ask(client)
                    if is_screen:
                        screen.update(view(result), refresh=True)
                    else:
                        self.show(result, partial(view, result), is_one_of_many=True)


def _suggest(
    metavar: str,
    text: str,
    ask: Callable[[AdminClient], Awaitable[Iterable[ResultT]]],
    entry: Callable[[ResultT], tuple[str, str]],
) -> Any:
    """An argument that the shell completes to one of the entries, each a word and its help."""

    async def suggestions(given: Mapping[str, Any]) -> list[tuple[str, str]]:
        async with Connection(**given).admin_client() as client:
            return [entry(each) for each in await ask(client)]

    def suggest(click: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        words = {name: click.params.get(name) for name in Connection.model_fields}
        given: dict[str, Any] = {name: word for name, word in words.items() if word is not None}
        # A shell that completes a word does not wait longer for a coordinator
        given["timeout"] = 1.0
        try:
            return [each for each in asyncio.run(suggestions(given)) if each[0].startswith(incomplete)]
        except (errors.TandemError, ValidationError):
            return []  # a suggestion that fails must never disturb the shell

    return typer.Argument(metavar=metavar, help=text, autocompletion=suggest)


Address = Annotated[
    str,
    _suggest(
        "ADDRESS",
        "host:port, as in the list.",
        AdminClient.replicas,
        lambda shot: (shot.address, f"{shot.role.value}, {shot.state.value}"),
    ),
]
RequestId = Annotated[
    str,
    _suggest(
        "ID",
        "The request's id, or its beginning.",
        AdminClient.requests,
        lambda report: (report.request_id, errors.plural(report.completion_tokens, "token")),
    ),
]


@command(admin, "-w", "--address 10.0.0.5:50051 -o json")
async def status(query: WatchQuery) -> None:
    """Show replicas, load, acceptance and throughput."""
    address = query.address
    await query.answer(AdminClient.status, lambda found: views.status_view(found, address))


@command(replicas, "-w", "-o yaml")
async def list_replicas(query: WatchQuery) -> None:
    """List replicas with state, load and acceptance."""
    await query.answer(AdminClient.replicas, views.replicas_view)


@command(replicas, "10.0.0.7:50053")
async def show_replica(replica: Address, query: Query) -> None:
    """Show a replica and its model."""

    async def ask(client: AdminClient) -> ReplicaSnapshot:
        return replica_at(await client.replicas(), replica)

    await query.answer(ask, views.replica_view)


@command(replicas, "10.0.0.7:50053", "10.0.0.7:50053 --yes")
async def drain(
    replica: Address,
    query: Query,
    yes: Annotated[bool, typer.Option("--yes", help="Drain the last target without asking.")] = False,
) -> None:
    """Stop sending new sequences to a replica.

    Its own sequences move to another one, or finish there. Without any other target requests wait and then fail, so
    draining the last one needs confirmation.
    """

    async def ask(client: AdminClient) -> ReplicaSnapshot:
        known = await client.replicas()
        is_last = is_last_target(replica_at(known, replica), known)
        if is_last and not yes:
            what = f"{replica} is the last target that takes new sequences"
            if not sys.stdin.isatty():
                raise errors.ConfigurationError(f"{what}; to drain it all the same, give --yes")
            # On stderr, since stdout is for the result.
            write_error(f"{what}: requests will wait and then fail. Drain it? [y/N] ")
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                raise errors.TandemError("nothing was drained")
        return await client.drain(replica, allow_last_target=is_last)

    await query.answer(ask, lambda drained: views.replica_table([drained]))


@command(replicas, "10.0.0.7:50053")
async def resume(replica: Address, query: Query) -> None:
    """Give a drained replica new sequences again."""
    await query.answer(lambda client: client.resume(replica), lambda resumed: views.replica_table([resumed]))


class ServiceScope(TypedDict):
    """Arguments that every change of services takes."""

    replicas: Collection[str]
    services: Credentials
    timeout_seconds: float


class ServiceQuery(Query):
    """A query that asks services themselves, with a token of theirs."""

    with_variables: ClassVar[tuple[str, ...]] = (
        *Query.with_variables,
        "service_token",
        "service_token_file",
    )

    repeatable: ClassVar[tuple[str, ...]] = ("replica",)

    replica: Annotated[tuple[str, ...], typer.Option("--replica", metavar="ADDRESS")] = ()
    """Only this replica, as in the list; may be given several times."""
    service_token: str | None = None
    """Admin token of the services; better in the environment or in --service-token-file."""
    service_token_file: Path | None = None
    """File whose first line is the admin token of the services."""

    @property
    def scope(self) -> ServiceScope:
        """The services to change: those named, with the connection's TLS and the services' own token."""
        token = {"token": self.service_token, "token_file": self.service_token_file}
        return {
            "replicas": self.replica,
            "services": Credentials.of(self.model_dump() | token),
            "timeout_seconds": self.timeout or CHANGE_TIMEOUT_SECONDS,
        }

    async def change(self, ask: Callable[[AdminClient], Awaitable[dict[str, Weights]]]) -> None:
        """Ask, and show the weights that each replica has now."""
        await self.answer(ask, views.weights_view)


Who = Annotated[Role, typer.Argument(help="target or draft.")]
InFlightOption = Annotated[
    InFlight,
    typer.Option(
        "--in-flight", help="Open sequences: finish with the old weights, abort, or restart on the new ones."
    ),
]


@command(
    weights,
    "target --path step-17 --service-token-file token",
    "draft --path step-10 --replica 10.0.0.7:50053 --in-flight restart",
)
async def load(
    role: Who,
    query: ServiceQuery,
    path: Annotated[str, typer.Option(help="Folder below the services' --weights-root.")],
    in_flight: InFlightOption = InFlight.FINISH,
) -> None:
    """Serve other weights of the same model.

    The services are called directly and need their own admin token. They check the weights before anything changes;
    where anything is wrong the old ones serve on.
    """
    await query.change(lambda client: client.load_weights(role, path, in_flight=in_flight, **query.scope))


@command(admin, "target --level 2 --service-token-file token")
async def sleep(
    role: Who,
    query: ServiceQuery,
    level: Annotated[int, typer.Option(help="1 frees the cache, 2 the weights as well.")] = 1,
    in_flight: InFlightOption = InFlight.FINISH,
) -> None:
    """Free the memory of targets or drafts until they are woken up. Requests wait for --target-wait-seconds."""
    await query.change(lambda client: client.sleep(role, level, in_flight=in_flight, **query.scope))


@command(admin, "target --service-token-file token")
async def wake(role: Who, query: ServiceQuery) -> None:
    """End the sleep of targets or drafts."""
    await query.change(lambda client: client.wake_up(role, **query.scope))


@command(requests, "-w")
async def list_requests(query: WatchQuery) -> None:
    """List running requests, the oldest first."""
    await query.answer(AdminClient.requests, views.requests_view)


@command(requests, "3f9c")
async def show_request(request_id: RequestId, query: Query) -> None:
    """Show a running request in detail."""
    await query.answer(lambda client: client.request(request_id), views.request_view)


@command(requests, "3f9c --reason 'making room'")
async def abort(
    request_id: RequestId,
    query: Query,
    reason: Annotated[str, typer.Option(help="Reason for its client.")] = "",
) -> None:
    """End a running request. Its client gets the status ABORTED and the reason; every service frees it."""
    await query.answer(
        lambda client: client.abort(request_id, reason), lambda ended: views.requests_view([ended])
    )


@command(admin, "", "--watch --interval 2", "--watch --count 10 -o json")
async def stats(query: WatchQuery) -> None:
    """Show what speculation did; --watch repeats it.

    The statistics begin with the coordinator's start. --watch updates them until Ctrl-C, and shows acceptance at each
    position since the last update. With it, JSON is one object per line and YAML one document per update.

    ACC. LENGTH is MAX's: accepted tokens per verification. MEAN LENGTH is vLLM's mean acceptance length: it counts only
    verifications with a proposal, and the target's own token.
    """
    looks: deque[Stats] = deque(maxlen=2)  # this one, and the one before

    def view(found: Stats) -> RenderableType:
        looks.appendleft(found)
        return views.stats_view(*looks)

    await query.answer(AdminClient.stats, view)


@command(config, "", "num_speculative_tokens", "--live -o json")
async def show_options(
    query: Query,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these options.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Only options that can be changed.")] = False,
) -> None:
    """Show every option, its value, and where the value comes from."""
    names = [key.replace("-", "_") for key in keys or ()]

    async def ask(client: AdminClient) -> list[ConfigOption]:
        known = await client.config()
        if unknown := [name for name in names if all(each.name != name for each in known)]:
            raise errors.NotFoundError(f"there is no option {', '.join(unknown)}")
        return [each for each in known if (not names or each.name in names) and (each.is_live or not live)]

    await query.answer(ask, views.options_view)


@command(
    config,
    "num_speculative_tokens 6",
    "speculation false",
    "rejection_sampling_strategy synthetic synthetic_acceptance_rate 0.7",
)
async def set_options(
    words: Annotated[list[str], typer.Argument(metavar="KEY VALUE...", help="Options and their values.")],
    query: Query,
) -> None:
    """Change options for new requests; running requests keep theirs.

    Several options change together or not at all. null unsets an optional option. The coordinator checks the same rules
    as at its start, and logs each change with its caller.
    """
    values = pairs(words)
    await query.answer(lambda client: client.update_config(values), views.options_view)


@command(config, "num_speculative_tokens")
async def reset_options(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Options.")], query: Query
) -> None:
    """Give options the values again that the coordinator started with."""
    await query.answer(lambda client: client.update_config({}, keys), views.options_view)


def pairs(words: Sequence[str]) -> dict[str, str]:
    """KEY VALUE KEY VALUE ..., or KEY=VALUE."""
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        key, equals, after = word.partition("=")
        value = after if equals else next(rest, None)
        if value is None:
            raise errors.ConfigurationError(f"{key} has no value; give KEY VALUE, or several of such pairs")
        found[key] = value
    return found


@command(admin, "", "--wait --timeout 120 && tandem generate 'Hello'")
async def health(
    query: Query,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help=f"Ask until it is healthy, for --timeout seconds. [default: {WAIT_SECONDS:g}]"
        ),
    ] = False,
) -> None:
    """Check whether requests can be completed.

    Exits 0 when they can, 3 when they cannot, 4 when the coordinator cannot be reached. Where an admin token is needed
    but missing, the command uses the standard health protocol.
    """
    deadline = time.monotonic() + (query.timeout or WAIT_SECONDS if wait else 0.0)

    async def ask(client: AdminClient) -> tuple[dict[str, Any], str]:
        while True:
            try:
                report, words = await _health(client)
                if report["healthy"] or time.monotonic() > deadline:
                    return report, words
            except errors.ServiceUnavailableError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    with Progress("tandem admin health", sys.stderr) as progress:
        progress.show("waiting until requests can be completed" if wait else "asking")
        async with query.admin_client() as client:
            report, words = await ask(client)
    query.show(report, lambda: words)
    raise typer.Exit(Exit.OK if report["healthy"] else Exit.UNHEALTHY)


async def _health(client: AdminClient) -> tuple[dict[str, Any], str]:
    """The health for programs, and in words."""
    healthy = serving = await client.is_serving()
    words = ["serving" if serving else "not serving"]
    # Empty where the token does not permit asking.
    known: dict[str, Any] = {"state": "", "targets_ready": None, "drafts_ready": None}
    with suppress(errors.UnauthenticatedError, errors.PermissionDeniedError):
        status = await client.status()
        healthy = serving and status.state.completes
        ready = [shot.role for shot in status.replicas if shot.state is ReplicaState.READY]
        targets = ready.count(Role.TARGET)
        drafts = ready.count(Role.DRAFT)
        known = {"state": status.state.value, "targets_ready": targets, "drafts_ready": drafts}
        words = [status.state.value, *([] if serving else words)]
        words += [f"{errors.plural(targets, 'target')} ready", f"{errors.plural(drafts, 'draft')} ready"]
    told = f"{'healthy' if healthy else 'unhealthy'}: {', '.join(words)}"
    return {"healthy": healthy, "serving": serving, **known}, told


@command(admin, "", "-o json")
async def doctor(query: Query) -> None:
    """Find problems, and suggest remedies.

    Checks the address, TLS, the token, versions, clocks and round trips from here, and replicas, models, load and
    acceptance from the coordinator. Exits 0 without a problem (warnings do not count), 3 with one, 4 when the
    coordinator cannot be reached, and 5 when it refuses the token.
    """
    findings, code = await examine(query)
    query.show({"healthy": code == 0, "findings": findings}, lambda: doctor_view(findings))
    raise typer.Exit(code)

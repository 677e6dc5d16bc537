"""The `tandem` command: its groups and exit codes. Each verb has a module, and the help imports none of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tandem
from tandem import errors
from tandem.serving.standard_streams import exit_with, fill_closed, unwritable


class Exit(IntEnum):
    """Exit codes, which the help of `tandem admin` lists."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNHEALTHY = 3
    UNREACHABLE = 4
    REFUSED = 5


_EXIT_CODES: tuple[tuple[type[errors.TandemError], Exit], ...] = (
    (errors.ModelFolderError, Exit.FAILED),
    (errors.ConfigurationError, Exit.USAGE),
    (errors.ServiceUnavailableError, Exit.UNREACHABLE),
    (errors.InvalidRequestError, Exit.REFUSED),
    (errors.UnauthenticatedError, Exit.REFUSED),
    (errors.PermissionDeniedError, Exit.REFUSED),
    (errors.CapacityError, Exit.REFUSED),
    (errors.TandemError, Exit.FAILED),
)


def exit_code(error: errors.TandemError) -> Exit:
    """The exit code for a kind of failure."""
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


class CommandGroup(typer.Typer):
    """A group of commands. Help without boxes: it has room for the whole name of an option."""

    def __init__(self, help_text: str, parent: CommandGroup | None = None, name: str = "tandem") -> None:
        super().__init__(
            help=help_text,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self.path: str = name if parent is None else f"{parent.path} {name}"
        """The words that call it."""
        if parent is not None:
            parent.add_typer(self, name=name)


VERBS = {
    "serve": ("serve", "Start one service: draft, target or coordinator."),
    "up": ("up", "Start a draft service, a target service and a coordinator here."),
    "generate": ("generate", "Complete a prompt."),
    "chat": ("generate", "Chat with the model, turn by turn."),
    "plan": ("plan", "Show the gain of speculation at each proposal length."),
    "audit": ("audit", "Check whether a server's speculative decoding is lossless."),
    "demo": (
        "demo",
        "Start a split cluster, kill parts of it in the middle of an answer, and compare speeds.",
    ),
    "bench": ("serve", "Compare ways of decoding here, or send a load."),
    "config": ("config", "Show or check the configuration."),
    "doctor draft": ("doctor", "Play the protocol of draft services against one."),
    "doctor target": ("doctor", "Play the protocol of target services against one."),
    "protos": ("protos", "Write the .proto files of Tandem's services."),
    "admin": ("admin", "Inspect and control a running coordinator."),
    "context": ("connection", "Save connections to coordinators under names."),
}
"""Module and summary of each verb. A module is imported when its verb is called: all of them take a second."""

_ADMIN_VERBS = ("status", "stats", "health", "doctor", "replicas", "requests")
"""Commands of `tandem admin` that somebody may look for without that word."""


class _Verbs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first words, which may be two: `doctor draft`."""
        if (both := " ".join(args[:2])) in VERBS:
            args = [both, *args[2:]]
        elif args[0] == "logs":
            raise errors.ConfigurationError(
                "there is no tandem logs: each service writes its log to standard error, which docker compose logs and "
                "kubectl logs show; tandem admin requests list shows what runs"
            )
        elif (meant := _meant(args[0])) and args[0] not in VERBS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {', '.join(map(repr, meant))}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a verb; None for another word."""
        if cmd_name not in VERBS:
            return None
        import_module(f"{__package__}.{VERBS[cmd_name][0]}")
        return typer.main.get_group(app).commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in VERBS.items()])


def _meant(word: str) -> list[str]:
    """Commands that a word may stand for, which is none itself."""
    found = [(name.partition(" ")[0], name) for name in VERBS]
    found += [(name, f"admin {name}") for name in _ADMIN_VERBS]
    near = get_close_matches(word, [first for first, _ in found])
    return [name for first, name in found if first in near]


_GIT_SECONDS = 5.0
"""The longest that git may take to name a commit, on a slow disk say."""

app = CommandGroup("Speculative decoding with the draft model and the target model as separate services.")


def checkout_commit(root: Path) -> str | None:
    """The commit that a folder has checked out, shortened by git; None where it is no checkout or git is missing."""
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def _print_version(is_wanted: bool) -> None:
    if not is_wanted:
        return
    commit = checkout_commit(Path(tandem.__file__).parents[1])
    origin = "" if commit is None else f" (commit {commit})"
    sys.stdout.write(f"tandem {tandem.__version__}{origin}\n")
    raise typer.Exit


@app.callback(cls=_Verbs)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding with the draft model and the target model as separate services."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write to stdout: its device is full, over a quota or gone. No path belongs to them."""


def main() -> None:
    """Entry point of the console script."""
    try:
        fill_closed()
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        # One sentence, but the whole help where no command was named at all.
        message = error.format_message().replace("Value error, ", "")  # pydantic's words
        if not message.startswith("Usage: "):
            message = f"error: {message[:1].lower()}{message[1:].rstrip('.')}"
        sys.stderr.write(message + "\n")
        sys.exit(error.exit_code)
    except errors.TandemError as error:
        exit_with(error, exit_code(error))
    except typer.Abort:
        sys.exit(Exit.FAILED)
    except BrokenPipeError:
        # The reader has closed the pipe; buffered output must not be written again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.FAILED)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        exit_with(unwritable(error), Exit.FAILED)
    else:
        sys.exit(code if isinstance(code, int) else Exit.OK)

"""Writes docs/configuration.md from the settings classes and the tables of rules, the fields in docs/http.md, the
messages in docs/protocol.md, and what several pages say of GPUs; `--check` tells if a page is stale."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from messages import messages  # type: ignore[import-not-found]  # beside this script
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from tandem.acceptance.strategies import COMBINATION_RULES
from tandem.config.names import LLAMA_CPP_NAMES, REFUSED_METHODS, REFUSED_OPTIONS, SGLANG_NAMES
from tandem.config.options import ALIASES, allowed_range
from tandem.config.rule import Rule, spell
from tandem.config.settings import ModelServerSettings, ServerSettings
from tandem.config.speculative import (
    AcceptanceOptions,
    DraftingOptions,
    LoadRange,
    ModelOptions,
    SourceOptions,
    SpeculativeConfig,
)
from tandem.serving.protection import AdminOptions, ProtectionOptions
from tandem.telemetry.settings import TelemetryOptions
from tandem_coordinator.http.schema import field_rows
from tandem_coordinator.replicas.compatibility import MODEL_RULES
from tandem_coordinator.requests.validation import BOUND_RULES, REQUEST_RULES
from tandem_coordinator.settings.coordinator import (
    CoordinatorSettings,
    HttpOptions,
    RequestBounds,
    ServiceAccessOptions,
)
from tandem_coordinator.settings.sampling import SamplingOptions
from tandem_draft.settings import DraftSettings
from tandem_target.settings import TargetSettings

PAGE = Path(__file__).with_name("configuration.md")
HTTP_PAGE = Path(__file__).with_name("http.md")
FIELDS_BEGIN = "<!-- fields: written by docs/generate.py -->\n"
FIELDS_END = "<!-- end of fields -->\n"
PEER_FIELDS = Path(__file__).with_name("peer-fields.toml")
"""The fields of other servers' requests."""

PROTOCOL_PAGE = Path(__file__).with_name("protocol.md")
MESSAGES_BEGIN = "<!-- messages: written by docs/generate.py from the comments in protos/ -->\n"
MESSAGES_END = "<!-- end of messages -->\n"
SERVICES = ("DraftService", "TargetService")
"""Those whose messages the page has."""

GPU_STATE = Path(__file__).with_name("gpu-state.txt")
"""The state of tests on GPUs, in the same words wherever a reader decides about one."""
GPU_PAGES = (PAGE.parents[1] / "README.md", PAGE.with_name("index.md"))
GPU_BEGIN = "<!-- gpus: docs/gpu-state.txt -->\n"
GPU_END = "<!-- end of gpus -->\n"

_INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate.py (`make docs`) from the classes and the tables of rules. Edit those. -->

You can set an option in four places. The first one that names it wins:

1. the command line: `--num-speculative-tokens 4`, or several at once: `--speculative-config '{"method": "ngram"}'`;
   the word `null` or `none` unsets a value from the environment or a file, for an option that may be unset;
2. the environment: `TANDEM_NUM_SPECULATIVE_TOKENS=4` for every service, or `TANDEM_COORDINATOR_...`, `TANDEM_DRAFT_...`
   and `TANDEM_TARGET_...` for any option of one service, which win over the former. An empty variable counts as unset;
3. for the coordinator and the draft service, a TOML, YAML or JSON file: `--config-file tandem.toml`, and
   `--section-name` for one of its sections;
4. the default.

In Python: `SpeculativeConfig(speculative_method="ngram", num_speculative_tokens=4)` from `tandem.config`.

`tandem serve SERVICE --help` lists the options that most people need, `--help-all` all of them. Unknown options are
refused everywhere, and one answer names all faults. `tandem config show` prints every value and where it comes
from; `tandem config check FILE|JSON` reports every broken rule and exits with 0 or 2. Services may share a file or an
environment: each reads its own options of the first five tables. Put options of one service alone into a section of
the file."""

_SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Drafting", "For the draft service; the coordinator checks that the two agree.", DraftingOptions),
    ("Models", "For the draft and the target service; the coordinator has `max_length` too.", ModelOptions),
    ("Acceptance", "For the coordinator.", AcceptanceOptions),
    ("Vocabularies, and what is fixed", "For the coordinator.", SpeculativeConfig),
    ("Files", "For the coordinator and the draft service.", SourceOptions),
    ("Sampling defaults", "For the coordinator.", SamplingOptions),
    ("Requests", "For the coordinator.", RequestBounds),
    ("Protection", "For every service; see [security](security.md).", ProtectionOptions),
    ("Admin calls", "For the coordinator.", AdminOptions),
    ("HTTP", "For the coordinator; see [HTTP](http.md).", HttpOptions),
    ("Access to the services", "For the coordinator.", ServiceAccessOptions),
    ("Coordinator", "Variables begin with `TANDEM_COORDINATOR_`.", CoordinatorSettings),
    ("Draft service", "Variables begin with `TANDEM_DRAFT_`.", DraftSettings),
    ("Target service", "Variables begin with `TANDEM_TARGET_`.", TargetSettings),
    ("Draft and target service", "Both have these.", ModelServerSettings),
    ("Every service", "All three have these.", ServerSettings),
    ("Traces and metrics", "For every service; see [observability](observability.md).", TelemetryOptions),
)

_TYPES: Mapping[object, str] = {
    LoadRange: "[from, to, K]",
    int: "integer", float: "number", bool: "boolean", str: "text", Path: "path", SecretStr: "secret", dict: "object",
}  # fmt: skip


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, *_options(), *_names(), *_rules()]
    return "\n\n".join(parts) + "\n"


def _options() -> Iterator[str]:
    yield "## Options\n\nNames that are MAX's or vLLM's say so; all others are Tandem's own."
    for title, words, cls in _SECTIONS:
        own = {name: cls.model_fields[name] for name in cls.__annotations__ if name in cls.model_fields}
        rows = [_option(name, field) for name, field in own.items()]
        yield f"### {title}\n\n{words}\n\n" + _table(("option", "type", "default", "meaning"), rows)


def _option(name: str, field: FieldInfo) -> Sequence[str]:
    meaning = " ".join((field.description or "").split()).removesuffix(" Tandem's own.")
    default = "" if field.default in (None, "") else f"`{spell(field.default)}`"
    if field.is_required():
        default = "required"
    kind = ", ".join(filter(None, (_type(field.annotation), allowed_range(field))))
    return f"`{name}`", kind, default, meaning


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        kind = _type(get_args(annotation)[0])
        return f"list of {kind}" if kind.endswith("]") else f"list of {kind}s"
    if name := _TYPES.get(annotation) or _TYPES.get(get_origin(annotation)):
        return name
    return " or ".join(_type(part) for part in get_args(annotation) if part is not NoneType)


def _names() -> Iterator[str]:
    yield "## Names from MAX and vLLM\n\nAccepted in place of the names above:\n\n" + _table(
        ("written", "meant"), [(f"`{alias}`", f"`{name}`") for alias, name in ALIASES.items()]
    )
    yield f"Options that are refused, with the reason, unless their value changes nothing: {_listed(REFUSED_OPTIONS)}."
    yield (
        "Options of SGLang and llama.cpp are refused with what they are called here: "
        f"{_listed((*SGLANG_NAMES, *LLAMA_CPP_NAMES))}."
    )
    yield f"Drafting methods that are refused, with the reason: {_listed(REFUSED_METHODS)}."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rules() -> Iterator[str]:
    yield "## Rules\n\nIf several rules are broken, the error names all of them."
    own = (*SpeculativeConfig.rules(), *COMBINATION_RULES)
    of_servers = [rule for rule in CoordinatorSettings.rules() if rule not in own]
    of_requests: Sequence[Rule[Any]] = (*BOUND_RULES, *REQUEST_RULES)
    kinds: tuple[tuple[str, str, Sequence[Rule[Any]]], ...] = (
        ("the configuration alone", "Checked wherever it is read; exit code 2.", own),
        ("a server", "Checked at start; exit code 2.", of_servers),
        ("the models", "Checked when the coordinator reaches its services; exit code 2.", MODEL_RULES),
        ("a request", "Checked before anything is computed; `INVALID_ARGUMENT`, exit code 5.", of_requests),
    )
    for title, words, rules in kinds:
        listed = "\n".join(f"- {rule.requirement}" for rule in rules)
        yield f"### Of {title}\n\n{words}\n\n{listed}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


_PATHS = {"both": ("/v1/completions", "/v1/chat/completions"), "completions": ("/v1/completions",)}
"""The paths of an endpoint in the table, where it is not the chat's."""


def _peer_names(peers: Mapping[str, Any], field: str, endpoint: str) -> tuple[str, str]:
    """The names that vLLM and SGLang have for a field; empty where they have none."""
    paths = _PATHS.get(endpoint, ("/v1/chat/completions",))
    found = []
    for peer in ("vllm", "sglang"):
        other = peers[peer].get("other_names", {}).get(field, "")
        is_same = any(field in peers[peer]["fields"][path] for path in paths)
        found.append("same" if is_same else ", ".join(f"`{name}`" for name in other.split(", ") if name))
    vllm, sglang = found
    return vllm, sglang


def _tests(peers: Mapping[str, Any], field: str) -> str:
    """The tests that show a field's effect."""
    found = [f"`{Path(file).stem}`" for file, fields in peers["tests"].items() if field in fields]
    return ", ".join(found) or "`test_schema`"


def http_page() -> str:
    """docs/http.md with the table of fields as it is by now."""
    before, _, rest = HTTP_PAGE.read_text(encoding="utf-8").partition(FIELDS_BEGIN)
    after = rest.partition(FIELDS_END)[2]
    peers = tomllib.loads(PEER_FIELDS.read_text(encoding="utf-8"))
    kept: dict[tuple[str, ...], list[str]] = {}
    refused: dict[str, list[str]] = {}
    for field, endpoint, text in field_rows():
        name = f"`{field}`"
        words = " ".join(text.split())
        if words.startswith("Refused"):
            condition, _, reason = words.removeprefix("Refused").partition(": ")
            where = "" if endpoint == "both" else f" ({endpoint})"
            refused.setdefault(reason, []).append(name + where + condition)
        else:
            key = (endpoint, *_peer_names(peers, field, endpoint), words, _tests(peers, field))
            kept.setdefault(key, []).append(name)
    head = (
        "field",
        "endpoint",
        f"vLLM {peers['vllm']['version']}",
        f"SGLang {peers['sglang']['version']}",
        "meaning",
        "test",
    )
    table = _table(head, [(", ".join(names), *key) for key, names in kept.items()])
    reasons = "\n".join(f"- {', '.join(names)}: {reason}" for reason, names in refused.items())
    return f"{before}{FIELDS_BEGIN}{table}\n\nRefused by name:\n\n{reasons}\n{FIELDS_END}{after}"


def protocol_page() -> str:
    """docs/protocol.md with the messages as they are by now."""
    before, _, rest = PROTOCOL_PAGE.read_text(encoding="utf-8").partition(MESSAGES_BEGIN)
    after = rest.partition(MESSAGES_END)[2]
    return before + MESSAGES_BEGIN + "\n\n".join(messages(SERVICES)) + "\n" + MESSAGES_END + after


def gpu_page(path: Path) -> str:
    """A page with the state of GPUs as it is by now."""
    state = GPU_STATE.read_text(encoding="utf-8")
    if path.parent != GPU_STATE.parent:
        state = state.replace("](", f"]({GPU_STATE.parent.name}/")
    before, _, rest = path.read_text(encoding="utf-8").partition(GPU_BEGIN)
    return f"{before}{GPU_BEGIN}{state}{GPU_END}{rest.partition(GPU_END)[2]}"


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or check them."""
    pages = {PAGE: page(), HTTP_PAGE: http_page(), PROTOCOL_PAGE: protocol_page()}
    pages |= {path: gpu_page(path) for path in GPU_PAGES}
    stale = [
        path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(pages[path], encoding="utf-8")
        return 0
    for path in stale:
        sys.stderr.write(f"error: {path.name} is stale; run make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Options of a load: those of `vllm bench serve` by the same names, and what runs when there is no server yet."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.load.arrivals import SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Lengths
from benchmarks.load.clients.http_exchange import Origin
from benchmarks.load.clients.over_http import origin_of
from benchmarks.load.cluster import RULES
from benchmarks.load.figures import Goodput

DESCRIPTION = """`tandem bench --clients N`: a load on a coordinator or on any OpenAI-compatible server.

    tandem bench --clients 64 --rate 20 --goodput ttft:500 itl:50
    tandem bench --clients 64 --address 127.0.0.1:50051 --json load.json
    tandem bench --clients 64 --http http://127.0.0.1:8000

Without --address and --http a coordinator runs before two scripted services, so that no model is measured. Requests
arrive as a Poisson process and have log-normal lengths; --seed decides both. Options are named as those of `vllm bench
serve`."""


def parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """Read the command line; wrong options end the process with a sentence."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--clients", type=_positive, default=64, help="connections, each with one request at once")
    add("--rate", type=_rate, default=math.inf, help="requests a second [default: as many as clients take]")
    add("--requests", type=_positive, help="[default: four for each client]")
    add("--seed", type=int, default=0, help="of arrivals and lengths")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="bounds of ttft, tpot, itl or e2el")
    add("--percentiles", type=_percents, default=[50.0, 90.0, 99.0], help="[default: 50,90,99]")
    add("--prompt-tokens", type=_lengths, default=SHAREGPT_PROMPTS, metavar="MEDIAN[:SIGMA[:MAXIMUM]]")
    add("--output-tokens", type=_lengths, default=SHAREGPT_OUTPUTS, metavar="MEDIAN[:SIGMA[:MAXIMUM]]")
    add("--temperature", type=float, help="[default: that of the rule; 0 at an address]")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--address", metavar="HOST:PORT", help="a coordinator that runs [default: start one]")
    add("--http", type=_origin, metavar="URL", help="an OpenAI-compatible server that runs, such as vLLM's")
    add("--model", help="model to ask for over HTTP [default: the first that the server lists]")
    add("--token-file", type=_file, help="file with the token for it")
    _add_own(parser.add_argument_group("of the coordinator that is started without --address and --http"))
    options = parser.parse_args(arguments)
    try:
        options.bounds = Goodput.parse(options.goodput)
    except ValueError as error:
        parser.error(f"argument --goodput: {error}")
    if options.http is not None and options.address:
        parser.error("--address and --http name two servers; give one of them")
    if options.over == "http" and (options.address or options.http is not None):
        parser.error("--over http is about a coordinator that is started; a server that runs has --http URL")
    return options


def _add_own(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rule", choices=RULES, default="greedy", help="acceptance rule above temperature 0")
    add("--over", choices=("grpc", "http"), default="grpc", help="what clients speak [default: grpc]")
    add("--workers", type=_positive, default=1)
    add("--measure-waits", action="store_true", help="measure where rounds wait in the coordinator")
    add("--stream-interval", type=_positive, default=1)
    add("--num-speculative-tokens", type=_positive, default=4)
    add("--acceptance", type=float, default=0.72, help="share of positions where the scripted draft is right")
    add("--verify-ms", type=float, default=5.0, help="duration of a step of the scripted target")
    add("--draft-ms", type=float, default=1.0, help="duration of a scripted proposal")


def shown(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON has them, without what names a file of this machine."""
    found = {
        name: value for name, value in vars(options).items() if name not in ("bounds", "json", "token_file")
    }
    found["http"] = None if options.http is None else str(options.http)
    found["rate"] = None if math.isinf(options.rate) else options.rate
    for name in ("prompt_tokens", "output_tokens"):
        found[name] = asdict(found[name])
    return found


def _positive(text: str) -> int:
    return int(_checked(text, int, lambda value: value >= 1, "must be a whole number of at least 1"))


def _rate(text: str) -> float:
    return _checked(text, float, lambda value: value > 0, "must be a number above 0, or inf")


def _percents(text: str) -> list[float]:
    words = "must be numbers from 0 to 100 with commas between them"
    return [_checked(part, float, lambda value: 0 <= value <= 100, words) for part in text.split(",")]


def _origin(text: str) -> Origin:
    try:
        return origin_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file that can be read")
    return Path(text)


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _checked(text: str, kind: type, is_right: Callable[[float], bool], words: str) -> float:
    try:
        value = float(kind(text))
    except ValueError:
        value = math.nan
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"{text!r} {words}")
    return value

"""`tandem demo`: a split cluster, an answer that survives the death of a draft and of a target, and the speed of three
ways to decode."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import typer
from pydantic import Field
from rich.console import Console, RenderableType
from rich.text import Text

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.config import names
from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem.model.replica import ReplicaState
from tandem.model.types import ChatMessage, GenerationRequest
from tandem.model_sources import bundled
from tandem.serving.children import Child
from tandem.serving.standard_streams import write_error
from tandem_coordinator.cli.command import VerbOptions, command, plain_table, print_parts
from tandem_coordinator.cli.generate import Record
from tandem_coordinator.cli.main import app
from tandem_coordinator.cli.serve import SERVICES
from tandem_coordinator.cli.up import SMOLLM2_METHOD, as_words, card_sampling, typed_program
from tandem_coordinator.stats.speculation import acceptance_rate, sum_stats, tokens_per_pass

HEARTBEAT_SECONDS = 2.5
"""A quiet phase says after so long what it waits for."""
START_SECONDS = 300.0
"""For the services to load their models; with a cold disk and kernels to compile it takes a minute."""
RETURN_SECONDS = 60.0
"""For a coordinator to take a restarted draft back."""
STOP_SECONDS = 20.0
TEMPERATURES = (0.0, 0.8)
"""Temperatures of the table. Each row is plain sampling at its temperature, so requests name a top_p of 1: a
coordinator's defaults may have another one."""
SEED = 7

EDITING = (
    "Write down this recipe again, one step after the other: To make tea, boil a cup of water. Put a tea bag in the "
    "cup. Pour the hot water into the cup. Wait for three minutes. Take the tea bag out of the cup. Add milk or sugar. "
    "Stir the tea with a spoon. Wait for two minutes. Drink the tea while it is hot. Wash the cup and the spoon with "
    "hot water. Put the cup and the spoon back into the cupboard. Close the cupboard, close the window and leave the "
    "kitchen.",
    "Correct the grammar of this text: She go to school every day by bus. Her brother go to school by bike. They comes "
    "home at four in the afternoon and they eats lunch together with their mother. After lunch they does their "
    "homework and plays in the garden.",
    "Rewrite this text and replace Anna by Maria: Anna lives in a small house near the river. Every morning Anna walks "
    "along the river to her school. In the school Anna has many friends. After school Anna and her friends play in the "
    "park near the river.",
)
"""Tasks whose answers repeat much of the question: a draft that looks tokens up in the prompt foresees those."""
QUESTIONS = (
    "Why is the sky blue?",
    "Name three colours and one thing of each colour.",
    "How do I bake bread?",
)
"""Questions whose answers are new text."""

REPEATING_CODE = (
    "parser = argparse.ArgumentParser()\n"
    "parser.add_argument('--input', type=str, default='input.txt', help='input file')\n"
    "parser.add_argument('--output', type=str, default='output.txt', help='output file')\n"
    "parser.add_argument('--verbose', ",
    "import unittest\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n        stack = Stack()\n"
    "        stack.push(1)\n        self.assertEqual(len(stack), 1)\n\n    def test_pop(self):\n",
)
NEW_CODE = ("def parse_args():\n", "class Stack:\n", "def main():\n")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to show, and the tasks that it is any good at."""

    name: str
    target: str
    """As a service names it."""
    head: Path
    chats: bool
    tasks: Mapping[str, Sequence[str]]
    """Prompts by kind; the first kind is one at which looking tokens up helps, and its first prompt is shown."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters that the model's card advises and its generation_config.json lacks."""


def smollm2() -> Subject:
    """SmolLM2 with its bundled head.

    Raises:
        ConfigurationError: the packages of the model are not installed.
    """
    missing = bundled.smollm2_missing()
    head = bundled.smollm2_head(SMOLLM2_METHOD)
    if missing or head is None:
        raise ConfigurationError(
            f"{bundled.SMOLLM2_NAME} needs {', '.join(missing) or 'its head'}: {bundled.SMOLLM2_COMMANDS}"
        )
    tasks = {"editing": EDITING, "questions": QUESTIONS}
    return Subject(bundled.SMOLLM2_NAME, bundled.SMOLLM2, head, True, tasks, bundled.SMOLLM2_SAMPLING)


def bundled_pair() -> Subject:
    """The target of the bundled pair with its head."""
    pair = bundled.demo_pair()
    tasks = {"repeating code": REPEATING_CODE, "new code": NEW_CODE}
    return Subject("the bundled target", str(pair.target), pair.head(SMOLLM2_METHOD), False, tasks)


class DemoOptions(VerbOptions):
    """Options of the demo."""

    model: Literal["smollm2", "demo"] | None = Field(
        default=None,
        description=f"{bundled.SMOLLM2_NAME}, or the target of the bundled pair, which continues Python code. "
        "[default: smollm2, or demo where its packages are missing]",
    )
    max_tokens: int = Field(default=96, ge=8)
    """Tokens of the answer that survives."""
    prompts: int = Field(default=2, ge=0, le=3)
    """Prompts of each kind for the table, 0 to leave it out."""
    table_tokens: int = Field(default=48, ge=8)
    """Tokens of each answer of the table."""


@command(app, "", "--model demo", "--prompts 0")
def demo(options: DemoOptions) -> None:
    """Start a split cluster, kill a draft and a target in the middle of an answer, and compare ways to decode.

    The demo starts two targets with a drafting head beside each, a draft service that looks tokens up in the prompt,
    and two coordinators over the same targets. Exit code 1: the answer was not the same.
    """
    screen = Screen()
    subject = choose_subject(options.model, screen)
    is_same = asyncio.run(_Demo(subject, options, screen).run())
    if not is_same:
        raise typer.Exit(1)


def choose_subject(model: str | None, screen: Screen) -> Subject:
    """The named model; by default SmolLM2, or without its packages the bundled target, and the screen says so.

    Raises:
        ConfigurationError: the named model is SmolLM2, and its packages are not installed.
    """
    if model == bundled.DEMO:
        return bundled_pair()
    try:
        return smollm2()
    except ConfigurationError as error:
        if model is not None:
            raise
        write_error(f"tandem demo: {error}\n")
        screen.say("The bundled pair takes its place.")
        return bundled_pair()


class Screen:
    """The demo's output: headings, answers in colour, and a line while nothing else is to be seen."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self.stream = Console(highlight=False, soft_wrap=True)
        """For answers, which arrive in pieces."""

    def say(self, text: str = "") -> None:
        """A line as it is."""
        self._console.print(text, markup=False)

    def head(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, "bold"))

    def note(self, text: str) -> None:
        """Words of the demo's own in the middle of an answer."""
        self.stream.print(Text(f" [{text}] ", "bold magenta"), end="")
        self.stream.file.flush()

    def show(self, table: RenderableType) -> None:
        print_parts("", table)

    @asynccontextmanager
    async def heartbeat(self, what: str) -> AsyncIterator[None]:
        """Say every few seconds what is waited for, until the block ends."""
        started = time.monotonic()

        async def beat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                self.say(f"  {time.monotonic() - started:3.0f} s: {what} ...")

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()


@dataclass(slots=True)
class Service:
    """A process of the cluster."""

    role: str
    does: str
    """The model that it runs, or the services that it speaks to."""
    child: Child
    address: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode, by the coordinator that does it."""

    name: str
    client: Client
    speculation: bool


class _Demo:
    """One run."""

    def __init__(self, subject: Subject, options: DemoOptions, screen: Screen) -> None:
        self._subject = subject
        self._options = options
        self._screen = screen

    async def run(self) -> bool:
        """True if the answer that lost its services is the undisturbed one."""
        async with AsyncExitStack() as stack:
            services = await self._start(stack)
            self._list(services)
            with_draft = await stack.enter_async_context(Client(services["coordinator A"].address))
            with_heads = await stack.enter_async_context(Client(services["coordinator B"].address))
            is_same = await self._show_faults(stack, with_draft, services)
            if is_same and self._options.prompts:
                await self._restart_draft(stack, services)
                ways = (
                    Way("target alone", with_draft, False),
                    Way("n-gram draft, a service of its own", with_draft, True),
                    Way("EAGLE-3 head beside the target", with_heads, True),
                )
                await self._compare(ways)
                self._screen.say(
                    "\naccepted: share of the proposed tokens; tokens/pass: tokens per target pass"
                )
                program = typed_program()
                self._screen.say(f"next: {program} up, and in another terminal {program} chat")
            return is_same

    # ---- the cluster

    async def _start(self, stack: AsyncExitStack) -> dict[str, Service]:
        subject = self._subject
        self._screen.say(
            f"Starting two targets ({subject.name}), a draft service and two coordinators as processes of their own."
        )
        if subject.sampling:
            self._screen.say(
                f"At both coordinators {card_sampling(subject.sampling)}; those of this demo name their temperature, "
                f"and top_p 1."
            )
        with_head = f"{subject.name}, EAGLE-3 head"
        words = as_words(model=subject.target, draft_model=subject.head)
        async with self._screen.heartbeat("loading the models"):
            services = {
                "target 1": await self._run(stack, "target 1", with_head, "target", words),
                "target 2": await self._run(stack, "target 2", with_head, "target", words),
                "draft": await self._run(
                    stack, "draft", "n-gram lookup, no model", "draft", as_words(method=names.NGRAM)
                ),
            }
            async with asyncio.timeout(START_SECONDS):
                for service in services.values():
                    service.address = await service.child.line("ready on ")
            targets = ",".join(services[name].address for name in ("target 1", "target 2"))
            for name, drafts, does in (
                ("coordinator A", services["draft"].address, "targets 1 and 2, and the draft"),
                ("coordinator B", None, "targets 1 and 2, which draft by their heads"),
            ):
                words = coordinator_words(subject, targets, drafts)
                services[name] = await self._run(stack, name, does, "coordinator", words)
            async with asyncio.timeout(START_SECONDS):
                for name in ("coordinator A", "coordinator B"):
                    services[name].address = await services[name].child.line("ready on ")
        return services

    async def _run(
        self,
        stack: AsyncExitStack,
        role: str,
        does: str,
        service: str,
        words: Sequence[str],
        port: int = 0,
    ) -> Service:
        # Lost replicas are the point here, and are told in the text.
        arguments = [*words, *as_words(host="127.0.0.1", port=port, log_level="error")]
        child = await Child.start(role, SERVICES[service], arguments, STOP_SECONDS)
        stack.push_async_callback(child.stop)
        return Service(role, does, child)

    def _list(self, services: Mapping[str, Service]) -> None:
        table = plain_table("ROLE", "ADDRESS", ">PROCESS", "MODEL, OR WHO IT SPEAKS TO")
        for service in services.values():
            table.add_row(service.role, service.address, str(service.child.process.pid), service.does)
        self._screen.show(table)

    # ---- an answer that survives

    async def _show_faults(self, stack: AsyncExitStack, client: Client, services: dict[str, Service]) -> bool:
        kind, (text, *_) = next(iter(self._subject.tasks.items()))
        request = await self._request(client, text, temperature=0.0, max_tokens=self._options.max_tokens)
        self._screen.head(f"{kind.capitalize()}, by coordinator A with the draft service, temperature 0")
        self._screen.say(text.rstrip())
        self._screen.head("The answer; green tokens were proposed by the draft and accepted by the target")
        undisturbed = await self._stream(client, request)
        self._screen.head(
            "The same again; the draft is killed in the middle, and then the target that answers"
        )
        disturbed = await self._stream(client, request, services)
        is_same, verdict = compare(undisturbed.whole.token_ids, disturbed.whole.token_ids)
        self._screen.say(f"\n{verdict}")
        return is_same

    async def _stream(
        self, client: Client, request: GenerationRequest, services: dict[str, Service] | None = None
    ) -> Record:
        """Print the answer as it comes; with services, kill the draft after a quarter of it, the target after half."""
        record = Record()
        count = 0
        planned = [] if services is None else ["draft", "target"]
        length = self._options.max_tokens
        async for chunk in client.generate(request):
            record.add(chunk, self._screen.stream)
            count += len(chunk.token_ids)
            if planned and services is not None and count >= length * (3 - len(planned)) / 4:
                victim = await self._victim(planned.pop(0), services)
                victim.child.kill()
                await victim.child.process.wait()
                self._screen.note(f"{victim.role}, process {victim.child.process.pid}, was killed")
        self._screen.stream.print()
        return record

    async def _victim(self, role: str, services: dict[str, Service]) -> Service:
        if role == "draft":
            return services["draft"]
        async with AdminClient(services["coordinator A"].address) as admin:
            running = await admin.requests()
        used = running[0].target_address if running else services["target 1"].address
        return next(service for service in services.values() if service.address == used)

    async def _restart_draft(self, stack: AsyncExitStack, services: dict[str, Service]) -> None:
        """Start the draft again where it was, and wait until the coordinator has taken it back by itself."""
        address = services["draft"].address
        port = int(address.rpartition(":")[2])
        async with self._screen.heartbeat("the draft starts again at its address"):
            again = await self._run(stack, "draft", "", "draft", as_words(method=names.NGRAM), port)
            await again.child.line("ready on ")
            async with AdminClient(services["coordinator A"].address) as admin:
                deadline = time.monotonic() + RETURN_SECONDS
                while not await self._is_ready(admin, address):
                    if time.monotonic() > deadline:
                        raise ServiceUnavailableError(
                            f"coordinator A did not take the draft at {address} back within {RETURN_SECONDS:g} s"
                        )
                    await asyncio.sleep(0.1)
        self._screen.say(
            f"the draft runs again as process {again.child.process.pid}, and coordinator A has taken it back"
        )

    async def _is_ready(self, admin: AdminClient, address: str) -> bool:
        replicas = await admin.replicas()
        return any(each.address == address and each.state is ReplicaState.READY for each in replicas)

    # ---- the table

    async def _compare(self, ways: Sequence[Way]) -> None:
        count = self._options.prompts
        kinds = {kind: prompts[:count] for kind, prompts in self._subject.tasks.items()}
        self._screen.head(
            f"The speed of each way, in turn on the same prompts, {self._options.table_tokens} tokens each"
        )
        table = plain_table("DECODING", ">TOKENS/S", ">ACCEPTED", ">TOKENS/PASS", ">SPEED-UP")
        for kind, prompts in kinds.items():
            for temperature in TEMPERATURES:
                name = f"{kind}, temperature {temperature:g}"
                async with self._screen.heartbeat(name):
                    records = await self._measure(ways, prompts, temperature)
                table.add_row(Text(name, "italic"))
                alone = _speed(records[0])
                for way, of_way in zip(ways, records, strict=True):
                    table.add_row(f"  {way.name}", *_figures(of_way), f"{_speed(of_way) / alone:.2f} x")
        self._screen.show(table)

    async def _measure(
        self, ways: Sequence[Way], prompts: Sequence[str], temperature: float
    ) -> list[list[Record]]:
        """The answers of each way. The ways take turns, so that a machine that slows down slows all of them."""
        records: list[list[Record]] = [[] for _ in ways]
        for text in prompts:
            for way, of_way in zip(ways, records, strict=True):
                request = await self._request(
                    way.client, text, temperature=temperature, max_tokens=self._options.table_tokens
                )
                request = replace(request, speculation=way.speculation)
                record = Record()
                async for chunk in way.client.generate(request):
                    record.add(chunk)
                of_way.append(record)
        return records

    async def _request(
        self, client: Client, text: str, *, temperature: float, max_tokens: int
    ) -> GenerationRequest:
        prompt: str | tuple[int, ...] = text
        if self._subject.chats:
            prompt = await client.chat_prompt([ChatMessage("user", text)])
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0,
            seed=SEED,
            ignore_eos=not self._subject.chats,
        )


def coordinator_words(subject: Subject, targets: str, drafts: str | None) -> list[str]:
    """The options of a coordinator over these addresses, with the sampling parameters of the model's card. Without
    drafts the targets propose by heads of their own."""
    return as_words(
        target_address=targets,
        draft_address=drafts,
        rejection_sampling_strategy=names.AUTO,
        override_generation_config=json.dumps(subject.sampling) if subject.sampling else None,
    )


def compare(wanted: Sequence[int], got: Sequence[int]) -> tuple[bool, str]:
    """True if an answer has the wanted token ids, and the sentence that says so or names the first other token."""
    question = f"same {len(wanted)} tokens:"
    if tuple(got) == tuple(wanted):
        return True, f"{question} yes"
    pairs = enumerate(zip_longest(got, wanted), start=1)
    first = next(position for position, (one, other) in pairs if one != other)
    return False, f"{question} no, {len(got)} came, and they differ from token {first} on"


def _speed(records: Sequence[Record]) -> float:
    tokens = sum(len(record.whole.token_ids) for record in records)
    return tokens / sum(record.total_seconds for record in records)


def _figures(records: Sequence[Record]) -> Iterator[str]:
    """Tokens a second, acceptance and tokens a pass."""
    yield f"{_speed(records):.1f}"
    stats = sum_stats(record.summary.speculation for record in records)
    if not stats.drafted:
        yield from ("", "")
        return
    yield f"{acceptance_rate(stats):.0%}"
    yield f"{tokens_per_pass(stats):.2f}"

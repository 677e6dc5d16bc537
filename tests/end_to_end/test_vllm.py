"""The plug-in inside a real vLLM: the same text, acceptance as of vLLM's own draft model, and nothing hurt by a draft.

Each vLLM takes about a minute to start, so one run of them answers several questions.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import Contender, chosen
from benchmarks.contenders import CONTENDERS, Addresses, BenchSettings, Setup
from benchmarks.pairs import Pair, open_pair
from benchmarks.peers import Outcome, Workload, peer
from tests.end_to_end.processes import address_of, model_service
from tests.paths import DEMO_DRAFT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = 20
MAX_TOKENS = 48
ACCEPTANCE_TOLERANCE = 0.03
DRAWN_TOLERANCE = 0.06
"""Of drawn tokens, which are other ones each time; docs/measurements.md compares more of them."""


@pytest.fixture
def vllm_python(request: pytest.FixtureRequest) -> str:
    path: str = request.config.getoption("--vllm-python")
    if not path:
        pytest.skip("needs a Python with vLLM: make test-vllm, or --vllm-python PYTHON")
    assert Path(path).is_file(), f"--vllm-python is {path}; it must be the file of a Python"
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return open_pair("demo", tmp_path, "cpu")


def setup_of(python: str, pair: Pair, logs: Path) -> Setup:
    settings = BenchSettings(
        dtype="float32",
        max_tokens=4 * MAX_TOKENS,
        threads=1,
        vllm_python=Path(python),
        vllm_eager=True,
    )
    return Setup(settings, pair, logs)


def texts(outcomes: list[Outcome]) -> list[list[int]]:
    return [answer.token_ids for outcome in outcomes for answer in outcome.answers]


def acceptance(outcomes: list[Outcome]) -> float:
    return sum(one.accepted for one in outcomes) / sum(one.drafted for one in outcomes)


async def test_text_and_acceptance_are_those_of_vllm_itself(
    vllm_python: str, pair: Pair, tmp_path: Path
) -> None:
    prompts = pair.prompts()[:PROMPTS]
    async with AsyncExitStack() as stack:
        draft = stack.enter_context(
            model_service("draft_service", DEMO_DRAFT, "--dtype", "float32", "--no-enable-prefix-caching")
        )
        at = Addresses(draft=await asyncio.to_thread(address_of, draft))
        setup = setup_of(vllm_python, pair, tmp_path)
        ways = {
            name: await stack.enter_async_context(CONTENDERS[name].start(setup, at))
            for name in ("vllm", "vllm-draft", "vllm-tandem", "vllm-tandem-ahead")
        }
        for batch in (1, 16):
            workloads = [
                Workload(chosen(prompts, batch, number), 0.0, MAX_TOKENS, number)
                for number in range(-(-PROMPTS // batch))
            ]
            found = {name: [await way(each) for each in workloads] for name, way in ways.items()}
            for name in ("vllm-tandem", "vllm-tandem-ahead"):
                assert texts(found[name]) == texts(found["vllm"]), f"{name}, batch {batch}: another text"
                assert found[name][0].drafted > 0, f"{name}, batch {batch}: nothing was drafted"
                difference = acceptance(found[name]) - acceptance(found["vllm-draft"])
                assert abs(difference) <= ACCEPTANCE_TOLERANCE, f"{name}, batch {batch}: {difference:+.3f}"
        drawn = Workload(chosen(prompts, 16, 0), 1.0, 4 * MAX_TOKENS, 7)
        found = {name: [await ways[name](drawn)] for name in ("vllm-draft", "vllm-tandem")}
        difference = acceptance(found["vllm-tandem"]) - acceptance(found["vllm-draft"])
        assert abs(difference) <= DRAWN_TOLERANCE, f"drawn: {difference:+.3f}"


@asynccontextmanager
async def plugged(
    python: str, pair: Pair, address: str, log: Path, tensor_parallel_size: int = 1, **environment: str
) -> AsyncIterator[Contender]:
    setup: dict[str, Any] = {
        **setup_of(python, pair, log.parent).as_json(),
        "mode": "tandem",
        "tensor_parallel_size": tensor_parallel_size,
        "environment": {
            "TANDEM_VLLM_DRAFT_ADDRESS": address,
            "TANDEM_VLLM_DRAFT_AHEAD": "off",
            **environment,
        },
    }
    async with peer("vllm", [python, "benchmarks.peers", "vllm"], setup, log) as running:
        yield running


async def test_no_request_fails_when_drafts_are_stopped_and_killed_under_it(
    vllm_python: str, pair: Pair, tmp_path: Path
) -> None:
    """Sixteen streams; the draft is stopped, goes on, is killed, and another takes its place at the same address."""
    workload = Workload(tuple(pair.prompts()[:16]), 0.0, 4 * MAX_TOKENS)
    async with AsyncExitStack() as stack:
        draft = stack.enter_context(model_service("draft_service", DEMO_DRAFT, "--dtype", "float32"))
        address = await asyncio.to_thread(address_of, draft)
        vllm = await stack.enter_async_context(plugged(vllm_python, pair, address, tmp_path / "log"))
        undisturbed = await vllm(workload)
        assert undisturbed.accepted > 0
        expected = [answer.token_ids for answer in undisturbed.answers]

        async def disturbed(*signals: signal.Signals) -> int:
            running = asyncio.ensure_future(vllm(workload))
            for number in signals:
                await asyncio.sleep(undisturbed.seconds / 4)
                draft.signal(number)
            outcome = await running
            assert [answer.token_ids for answer in outcome.answers] == expected
            return outcome.accepted

        assert await disturbed(signal.SIGSTOP, signal.SIGCONT) > 0
        await disturbed(signal.SIGKILL)
        assert await disturbed() == 0, "a draft that is dead proposed"
        port = address.rpartition(":")[2]
        again = stack.enter_context(
            model_service("draft_service", DEMO_DRAFT, "--dtype", "float32", "--port", port)
        )
        await asyncio.to_thread(address_of, again)
        await asyncio.sleep(2.0)  # until its health was asked for
        last = await vllm(workload)
        assert [answer.token_ids for answer in last.answers] == expected
        assert last.accepted > 0, "the draft that was started again is not used"


async def test_of_two_tensor_parallel_workers_one_asks(vllm_python: str, pair: Pair, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with AsyncExitStack() as stack:
        draft = stack.enter_context(model_service("draft_service", DEMO_DRAFT, "--dtype", "float32"))
        address = await asyncio.to_thread(address_of, draft)
        vllm = await stack.enter_async_context(
            plugged(
                vllm_python,
                pair,
                address,
                log,
                tensor_parallel_size=2,
                VLLM_CPU_OMP_THREADS_BIND="0|1",
                # Two workers that poll on two cores hold the draft up for longer than its tokens are worth.
                TANDEM_VLLM_DRAFT_PATIENCE_SECONDS="5",
                VLLM_LOGGING_LEVEL="INFO",
            )
        )
        outcome = await vllm(Workload(tuple(pair.prompts()[:2]), 0.0, MAX_TOKENS))
        assert outcome.accepted > 0
        said = log.read_text(encoding="utf-8")
    assert said.count("Loaded custom proposer class") == 2, "there are not two workers"
    assert said.count("Tandem drafts by") == 1

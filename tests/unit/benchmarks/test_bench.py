"""`tandem bench`: options, who can take part, turns, pace, report."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.bench import parse
from benchmarks.contenders import CONTENDERS, Setup, prepared
from benchmarks.gpu import CampaignSettings, pieces
from benchmarks.pace import Pace
from benchmarks.peers import Answer, Contender, Outcome, PacedStep, Workload
from benchmarks.report import steps_between
from tandem.config.settings import load_settings
from tandem.engine.core.jobs import StepRecord
from tandem.errors import ConfigurationError
from tandem_load.common import rotated
from tests.paths import DEMO_DRAFT


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(["--batch", "0", "--rounds", "x", "--dtype", "int8", "--contenders", "nobody"])

    message = str(caught.value)
    for words in ("batch.0 is 0", "rounds is 'x'", "dtype is int8", "there is no contender 'nobody'"):
        assert words in message


@pytest.mark.parametrize("words", [["--batch", "2", "8"], ["--batch", "2,8"], ["--batch=2,8"]])
def test_several_values_have_commas_or_spaces_between_them(words: list[str]) -> None:
    assert parse([*words, "--no-seeded"]).batch == (2, 8)


def test_a_comparison_is_set_like_any_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_BENCH_ROUNDS", "3")
    monkeypatch.setenv("TANDEM_BENCH_BATCH", "2,8")
    settings = parse(["--batch", "1", "--json", str(tmp_path / "a"), "--markdown", str(tmp_path / "b")])
    assert (settings.batch, settings.rounds) == ((1,), 3)
    assert (settings.json_file, settings.markdown_file) == (tmp_path / "a", tmp_path / "b")
    assert settings.origins["rounds"] == "environment"
    with pytest.raises(ConfigurationError, match="--runds is not an option; did you mean --rounds"):
        parse(["--runds", "1"])


def test_a_target_without_a_head_leaves_the_contender_out(tmp_path: Path) -> None:
    with prepared(parse([])) as setup:
        elsewhere = replace(setup, pair=replace(setup.pair, target=tmp_path / "target"))
        draft = replace(setup, settings=setup.settings.model_copy(update={"head": DEMO_DRAFT}))

    no_head = "name the folder of the target's eagle3 head with --head"
    assert CONTENDERS["eagle3"].absent(elsewhere) == no_head
    assert CONTENDERS["eagle3"].absent(draft) != "", "a draft model is no head"
    assert CONTENDERS["eagle3"].absent(setup) == ""


def test_everyone_runs_once_in_each_round_and_at_each_place_equally_often() -> None:
    names = ["a", "b", "c"]
    rounds = [rotated(names, number) for number in range(6)]

    assert all(sorted(order) == names for order in rounds)
    for name, place in product(names, range(3)):
        assert [order[place] for order in rounds].count(name) == 2


def test_a_step_sleeps_for_what_is_left_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace.from_text("6.5,1.2,0.1")
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    until: list[float] = []
    seen: list[StepRecord] = []
    wait = pace.paced("target", seen.append, until.append)
    wait(StepRecord(1, 1, 1, 0.001, 0.0025))
    wait(StepRecord(1, 9, 9, 0.001, 0.0))
    wait(StepRecord(1, 1, 1, 0.1, 0.1))
    assert until == pytest.approx([100.004, 100.0 + 0.0065 * 1.1, 99.9065], abs=1e-6)
    assert len(seen) == 3
    assert pace.seconds("draft", 1) == pytest.approx(0.0012)


def test_beside_another_engine_no_service_of_ours_takes_a_part_of_the_gpus() -> None:
    campaign = pieces(load_settings(CampaignSettings, [], "python -m benchmarks.gpu"))
    runs = [each.command[3:] for each in campaign if each.command[1:3] == ("-m", "benchmarks")]
    assert len(runs) == 6
    for settings in map(parse, runs):
        has_services = {CONTENDERS[each].is_ours for each in settings.contenders}
        assert len(has_services) == 1, settings.contenders
        assert not settings.phases, "which are measured by services"


NVIDIA_SMI = """#!/bin/sh
echo "$@" > "$0.asked"
echo "0, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65, 700.00 W, 5"
echo "1, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65, 700.00 W, 5"
"""


def test_the_report_names_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [line.split(", ")[1] for line in bench.list_gpus()] == ["NVIDIA H100 80GB HBM3"] * 2
    assert "name,memory.total,driver_version" in (tmp_path / "nvidia-smi.asked").read_text()

    tool.write_text("#!/bin/sh\nexit 9\n")
    assert bench.list_gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert bench.list_gpus() == ()


async def test_steps_are_timed_from_the_start_of_a_batch_and_not_from_that_of_its_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    @asynccontextmanager
    async def start(word: str, setup: Setup) -> AsyncIterator[Contender]:
        nonlocal now
        now = 105.0

        async def run(workload: Workload) -> Outcome:
            return Outcome([Answer()], 1.0)

        yield run

    monkeypatch.setattr(bench, "start", start)
    with prepared(parse(["--fresh", "--pace", "1,1"])) as setup:
        (setup.logs / "target.steps").write_text("105.5 106.0 1 1 target\n106.0 106.5 1 1 draft\n")
        outcome = await bench._Run(setup, print)._run(
            "target-alone", AsyncExitStack(), Workload(((1,),), 0.0, 2)
        )
    assert outcome.steps == [PacedStep(0.5, 1.0), PacedStep(1.0, 1.5, is_of_target=False)]


def test_time_between_steps_is_what_neither_the_target_nor_its_head_works_in() -> None:
    answer = Answer(arrivals=[(0.0, 1), (1.0, 2), (2.0, 2)])
    steps = [
        PacedStep(0.0, 0.5),
        PacedStep(0.5, 0.9, is_of_target=False),
        PacedStep(1.0, 1.5),
        PacedStep(5.0, 6.0),
    ]
    found = steps_between(Outcome([answer], 2.0, steps=steps))
    assert found == pytest.approx((2 / 4, 4 / 2.0, 0.05))

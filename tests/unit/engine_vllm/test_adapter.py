from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.engine_vllm import contract as vllm_contract
from tandem.engine_vllm.adapter import gpus_to_itself, prepare_process, share_beside
from tandem.engine_vllm.contract import check_engine, check_runner, differing, lacking
from tandem.errors import ConfigurationError


class _Executor:
    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None: ...


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("vllm")
    module.__version__ = "0.33.1"  # type: ignore[attr-defined]
    module.Executor = _Executor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_what_differs_is_named(vllm: ModuleType) -> None:
    used = {
        "vllm:Executor.collective_rpc": ("method", "args", "timeout"),
        "vllm:Executor.run": (),
        "vllm.absent:Thing": (),
    }
    assert list(differing(used)) == [
        "Executor.collective_rpc has no timeout",
        "there is no Executor.run in vllm",
        "there is no Thing in vllm.absent",
    ]
    assert not list(differing({"vllm:Executor.collective_rpc": ("method", "args")}))


def test_another_vllm_is_refused_by_what_it_lacks(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_contract, "USED", {"vllm:Executor.run": ()})
    with pytest.raises(ConfigurationError) as raised:
        check_engine()
    assert str(raised.value) == (
        "vLLM 0.33.1 is not as vLLM 0.32 is: there is no Executor.run in vllm; install vLLM 0.32, or a Tandem made for "
        "0.33.1"
    )


def test_a_runner_without_what_is_read_of_it_is_refused(vllm: ModuleType) -> None:
    missing = lacking(_Executor(), ("collective_rpc", "requests", "collective_rpc.cache"))
    assert missing == ["requests", "collective_rpc.cache"]
    with pytest.raises(ConfigurationError, match="its model runner has no requests; install"):
        check_runner(missing)


def test_no_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigurationError, match=r"engine is vllm and the package vllm cannot be imported"):
        check_engine()


@pytest.mark.parametrize(
    ("seen", "device", "count", "expected"),
    [
        (None, "cuda:2", 2, "2,3"),
        ("4,5,6,7", "cuda:1", 2, "5,6"),
        (None, "cuda", 2, None),
        (None, "cpu", 1, None),
    ],
)
def test_vllm_sees_the_devices_from_the_named_one_on(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, device: str, count: int, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})
    prepare_process(None, device, count)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_two_services_load_in_turn_on_the_gpus_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    order: list[str] = []

    def load_beside(devices: str, name: str) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        with gpus_to_itself(1):
            order.append(name)

    with gpus_to_itself(2):
        load_beside("1", "another GPU")
        sharing = threading.Thread(target=load_beside, args=("3", "the same GPU"))
        sharing.start()
        sharing.join(0.2)
        order.append("loaded")
    sharing.join()
    assert order == ["another GPU", "loaded", "the same GPU"]


def test_what_rows_take_is_left_free() -> None:
    assert share_beside(0.9, 4 << 30, 80 << 30) == pytest.approx(0.85)
    with pytest.raises(ConfigurationError, match=r"0.01, which is 819 MB .* rows alone take 1024 MB"):
        share_beside(0.01, 1 << 30, 80 << 30)

"""The campaign for a GPU: a record for each piece, whatever becomes of it, and nothing measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import CampaignSettings, Piece, measure, pieces, read_measured
from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError


def settings(*words: str) -> CampaignSettings:
    return load_settings(CampaignSettings, list(words), "python -m benchmarks.gpu")


def code(text: str, name: str = "a") -> Piece:
    return Piece(name, "to try it", (sys.executable, "-c", text))


def test_a_record_tells_how_a_piece_ended() -> None:
    good = measure(code("print('fine')"), settings())
    assert (good["exit_code"], good["said"], good["report"]) == (0, ["fine"], None)
    bad = measure(code("import sys; sys.exit('no memory')"), settings())
    assert (bad["exit_code"], bad["said"]) == (1, ["no memory"])
    slow = measure(code("import time; time.sleep(60)"), settings("--piece-seconds", "1"))
    assert slow["exit_code"] == 124
    absent = measure(Piece("a", "to try it", (), absent="there is no head"), settings())
    assert (absent["exit_code"], absent["said"]) == (None, ["there is no head"])


def test_it_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "gpu.jsonl"
    flag = tmp_path / "flag"
    flaky = f"import pathlib, sys; sys.exit(not pathlib.Path({str(flag)!r}).exists())"
    campaign = [code("pass", "first"), code(flaky, "second"), code("pass", "third")]
    monkeypatch.setattr(gpu, "pieces", lambda _: campaign)
    monkeypatch.setattr(sys, "argv", ["gpu", "--results", str(results)])
    gpu.main()
    assert read_measured(results) == {"first", "third"}
    flag.touch()
    gpu.main()
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [each["piece"] for each in records] == ["first", "second", "third", "second"]
    assert read_measured(results) == {"first", "second", "third"}
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "second: failed with exit code 1: it said nothing"
    assert said[3].startswith("second: measured in ")


@pytest.mark.parametrize("line", ["{", "[]", '{"piece": "tests"}'])
def test_a_file_of_something_else_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text(f"{line}\n")
    with pytest.raises(ConfigurationError, match="its line 1 is no record of a piece"):
        read_measured(file)


def test_the_pieces_are_in_order_of_worth() -> None:
    names = [each.name for each in pieces(settings("--wheels", "wheels"))]
    assert names == ["packages", "tests", "text", "draft", "vllm", "head", "vllm-head", "steps", "paced"]
    by_name = {each.name: each for each in pieces(settings())}
    assert "--head" in by_name["head"].absent
    assert not next(each for each in pieces(settings("--small")) if each.name == "head").absent

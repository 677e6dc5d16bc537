"""Drafts that a target cannot host, refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bound_service.service import BoundService
from tandem.errors import ConfigurationError
from target_service.service import TargetService
from target_service.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_TARGET

HEAD = {"architectures": ["LlamaForCausalLMEagle3"]}


def refusal(**settings: object) -> str:
    values = {"model": DEMO_TARGET, **settings}
    with pytest.raises(ConfigurationError) as error:
        BoundService(TargetSettings(**values))
    return str(error.value)


def test_a_draft_must_be_the_folder_of_a_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    BoundService(TargetSettings(model=DEMO_TARGET, draft_model=tmp_path))
    assert refusal() == "--draft-model is missing; give the folder of a drafting head for this model"
    missing = tmp_path / "nowhere"
    assert refusal(draft_model=missing) == f"--draft-model is {missing}; there is no such folder"
    rule = "beside a target it must be eagle or eagle3 or medusa or dflash"
    assert refusal(draft_model=DEMO_DRAFT) == f"--method is not given for the draft {DEMO_DRAFT}; {rule}"
    named = refusal(draft_model=tmp_path, speculative_method="ngram")
    assert named == f"--method is ngram for the draft {tmp_path}; {rule}"


def test_mtp_needs_no_draft(tmp_path: Path) -> None:
    BoundService(TargetSettings(model=DEMO_TARGET, speculative_method="deepseek_mtp"))
    assert refusal(draft_model=tmp_path, speculative_method="mtp") == (
        f"--method is mtp, whose weights lie in the target's own checkpoint, and --draft-model is {tmp_path}; leave "
        "out --draft-model"
    )


def test_a_target_alone_refuses_a_draft(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is started by `tandem serve target`"):
        TargetService(TargetSettings(model=DEMO_TARGET, draft_model=tmp_path))

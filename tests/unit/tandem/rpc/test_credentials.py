"""Files that are reloaded when they change, and the log about it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.errors import ConfigurationError
from tandem.rpc.credentials import ReloadedFile


def word(content: bytes) -> str:
    if not content:
        raise ConfigurationError("it is empty")
    return content.decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(b"first")
    return file


@pytest.fixture
def renewed(file: Path, caplog: pytest.LogCaptureFixture) -> ReloadedFile[str]:
    caplog.set_level(logging.INFO)
    return ReloadedFile([file], lambda contents: word(contents[0]))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = caplog.messages.copy()
    caplog.clear()
    return messages


GONE, REFUSED = (
    "file not readable; the last version stays",
    "renewed file refused; the last version stays",
)


def test_a_missing_file_is_logged_once(
    file: Path, renewed: ReloadedFile[str], caplog: pytest.LogCaptureFixture
) -> None:
    kept = file.with_name("kept")
    file.rename(kept)
    assert [renewed.value for _ in range(100)] == ["first"] * 100
    assert messages(caplog) == [GONE]
    kept.rename(file)
    assert [renewed.value for _ in range(100)] == ["first"] * 100
    assert messages(caplog) == ["files renewed"], "its return is logged as well"
    file.unlink()
    assert renewed.value == "first"
    assert messages(caplog) == [GONE]
    file.write_bytes(b"second")
    assert renewed.value == "second"


def test_an_invalid_file_is_logged_once(
    file: Path, renewed: ReloadedFile[str], caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(b"")
    assert [renewed.value for _ in range(100)] == ["first"] * 100
    assert messages(caplog) == [REFUSED]

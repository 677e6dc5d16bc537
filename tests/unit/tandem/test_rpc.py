"""Addresses, and files of credentials that are reloaded when they change."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest

from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError
from tandem.rpc.addresses import Address, resolve, split_addresses
from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import ReloadedFile
from tandem_coordinator.settings.coordinator import CoordinatorSettings


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("127.0.0.1:50052", [Address("127.0.0.1", 50052)]),
        ("a:1, b:2,", [Address("a", 1), Address("b", 2)]),
        ("[::1]:7", [Address("::1", 7)]),
        ("unix:/run/target", [Address("unix:/run/target", -1)]),
    ],
)
def test_addresses(text: str, addresses: list[Address]) -> None:
    assert list(split_addresses(text)) == addresses
    assert split_addresses(",".join(map(str, addresses))) == tuple(addresses)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:7"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="address"):
        load_settings(CoordinatorSettings, ["--target-address", text or ","], "test")


@pytest.mark.parametrize(
    ("host", "is_name"), [("127.0.0.1", False), ("::1", False), ("fe80::1%eth0", False), ("target", True)]
)
def test_only_names_are_looked_up(host: str, is_name: bool) -> None:
    assert Address(host, 1).is_name is is_name
    assert not Address("unix:/run/target", -1).is_name


def test_a_list_of_a_file_is_the_same_as_a_text_with_commas() -> None:
    settings = CoordinatorSettings(target_address=["127.0.0.1:1", "127.0.0.1:2"])
    assert settings.target_address == "127.0.0.1:1,127.0.0.1:2"


async def test_a_host_with_addresses_of_both_families_is_there_once() -> None:
    assert await resolve("localhost", 1) in (["127.0.0.1"], ["::1"])
    assert await resolve("127.0.0.1", 1) == ["127.0.0.1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target-address", "127.0.0.1:1,127.0.0.1:2"],
        ["--target-address", "127.0.0.1:1", "--target-address", "127.0.0.1:2"],
        ["--target-address=127.0.0.1:1", "--log-level", "error", "--target-address=127.0.0.1:2"],
    ],
)
def test_several_addresses_on_the_command_line(arguments: list[str]) -> None:
    settings = load_settings(CoordinatorSettings, arguments, "test")
    assert settings.target_address == "127.0.0.1:1,127.0.0.1:2"


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


GONE = "file not readable; the last version stays"
REFUSED = "renewed file refused; the last version stays"


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


async def test_a_limit_may_be_larger_than_grpc_can_say() -> None:
    """A target's vocabulary decides it, and whoever answers as one may say anything of that."""
    channel = open_channel("127.0.0.1:1", 2**40)
    assert channel.get_state() is grpc.ChannelConnectivity.IDLE
    await channel.close()

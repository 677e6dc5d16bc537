"""Parsing of addresses, and resolution of names."""

from __future__ import annotations

import pytest

from coordinator.settings.coordinator import CoordinatorSettings
from tandem.errors import ConfigurationError
from tandem.rpc.addresses import Address, resolve, split_addresses
from tandem.settings import load_settings


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


@pytest.mark.parametrize("arguments", [["--target-address"], ["--target-address="]])
def test_an_option_without_its_address(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"target.address"):
        load_settings(CoordinatorSettings, arguments, "test")

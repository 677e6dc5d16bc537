"""Unauthorized calls are refused with the right code; certificates and tokens are reloaded while the server runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.errors import ConfigurationError
from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.serving.tls import server_credentials
from tests.certificates import Files, issued
from tests.unit.tandem.serving.served import Scripted, health_of, refusal, running, texts_from, texts_on

TOKEN = "the-token-of-clients"
UNAVAILABLE, UNAUTHENTICATED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issued(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A certificate of an untrusted authority."""
    return issued(tmp_path_factory.mktemp("strangers"))


def tls_options(files: Files) -> dict[str, object]:
    return {"tls_cert_file": files.cert, "tls_key_file": files.key}


async def test_tls_and_a_token(files: Files, strangers: Files, capsys: pytest.CaptureFixture[str]) -> None:
    right = Credentials(ca_file=files.ca, token=TOKEN)
    refused = {
        "no token": (replace(right, token=""), UNAUTHENTICATED, "has no token"),
        "wrong token": (replace(right, token=TOKEN + "x"), UNAUTHENTICATED, "is not known"),
        "another authority": (replace(right, ca_file=strangers.ca), UNAVAILABLE, ""),
        "another name": (replace(right, server_name="example.org"), UNAVAILABLE, ""),
        "plain text": (Credentials(token=TOKEN), UNAVAILABLE, ""),
    }
    async with running(Scripted(), capsys, **tls_options(files), auth_token=TOKEN) as address:
        assert await texts_from(address, right) == ["hello"]
        for case, (credentials, code, words) in refused.items():
            error = await refusal(address, credentials)
            assert error.code() is code, case
            assert words in (error.details() or ""), case
            assert TOKEN not in (error.details() or ""), case
        assert await texts_from(address, right) == ["hello"]


async def test_mutual_tls(files: Files, strangers: Files, capsys: pytest.CaptureFixture[str]) -> None:
    trusting = Credentials(ca_file=files.ca)
    async with running(Scripted(), capsys, **tls_options(files), tls_client_ca_file=files.ca) as address:
        known = replace(trusting, cert_file=files.cert, key_file=files.key)
        assert await texts_from(address, known) == ["hello"]
        assert (await refusal(address, trusting)).code() is UNAVAILABLE, "no certificate"
        stranger = replace(trusting, cert_file=strangers.cert, key_file=strangers.key)
        assert (await refusal(address, stranger)).code() is UNAVAILABLE


async def test_health_is_open_and_reflection_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(Scripted(), capsys, auth_token=TOKEN) as address:
        assert await health_of(address) == "SERVING"
        for credentials, code in ((PLAIN, UNAUTHENTICATED), (Credentials(token=TOKEN), None)):
            async with open_channel(address, credentials=credentials) as channel:
                # The published stubs know only the synchronous channel.
                stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
                call = stub.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                )
                if code is None:
                    assert [answer async for answer in call]
                else:
                    assert await call.code() is code


async def test_a_renewed_certificate_is_served_without_a_restart(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = issued(tmp_path / "served")
    first = replace(served, ca=tmp_path / "first-ca.pem")
    first.ca.write_bytes(served.ca.read_bytes())
    async with running(Scripted(), capsys, **tls_options(served), auth_token=TOKEN) as address:
        before = Credentials(ca_file=first.ca, token=TOKEN)
        after = Credentials(ca_file=served.ca, token=TOKEN)
        async with open_channel(address, credentials=before) as connected:
            assert await texts_on(connected) == ["hello"]
            # The key alone, as in the middle of a renewal: the pair makes no sense, so the old one stays.
            old_key = served.key.read_bytes()
            served.key.write_bytes(files.key.read_bytes())
            assert await texts_from(address, before) == ["hello"]
            served.key.write_bytes(old_key)
            issued(tmp_path / "served")
            assert await texts_from(address, after) == ["hello"]
            assert (await refusal(address, before)).code() is UNAVAILABLE
            assert await texts_on(connected) == ["hello"], "open connections stay open"


def renew_once_half_is_read(monkeypatch: pytest.MonkeyPatch, served: Files, renewal: Files) -> None:
    """The files are replaced when their certificate is next read, and before the key is."""
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        content = read_bytes(path)
        if path == served.cert and renewal.cert.exists():
            renewal.ca.replace(served.ca)
            renewal.cert.replace(served.cert)
            renewal.key.replace(served.key)
        return content

    monkeypatch.setattr(Path, "read_bytes", read)


async def test_certificate_and_key_of_two_renewals_are_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served, next_ = issued(tmp_path / "served"), issued(tmp_path / "next")
    before = Credentials(ca_file=tmp_path / "before.pem", token=TOKEN)
    (tmp_path / "before.pem").write_bytes(served.ca.read_bytes())
    async with running(Scripted(), capsys, **tls_options(served), auth_token=TOKEN) as address:
        served.cert.touch()
        renew_once_half_is_read(monkeypatch, served, next_)
        assert await texts_from(address, before) == ["hello"], (
            "the old pair holds while the new one is half read"
        )
        assert await texts_from(address, Credentials(ca_file=served.ca, token=TOKEN)) == ["hello"]


async def test_renewed_tokens_apply_from_the_next_call_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, shown = tmp_path / "served", tmp_path / "shown"
    served.write_text(f"{TOKEN}\n", encoding="utf-8")
    shown.write_text(TOKEN, encoding="utf-8")
    new = "a-token-that-is-new"
    async with (
        running(Scripted(), capsys, auth_token_file=served) as address,
        open_channel(address, credentials=Credentials(token_file=shown)) as channel,
    ):
        assert await texts_on(channel) == ["hello"]
        served.write_text(f"{TOKEN}\n{new}\n", encoding="utf-8")
        assert await texts_on(channel) == ["hello"], "both hold while they are exchanged"
        shown.write_text(new, encoding="utf-8")
        assert await texts_on(channel) == ["hello"]
        served.write_text(f"{new}\n", encoding="utf-8")
        assert await texts_on(channel) == ["hello"]
        assert (await refusal(address, Credentials(token=TOKEN))).code() is UNAUTHENTICATED
        served.write_text("", encoding="utf-8")
        assert await texts_on(channel) == ["hello"], "an empty file is a mistake, not an open door"
        assert (await refusal(address)).code() is UNAUTHENTICATED


@pytest.mark.parametrize(
    ("cert", "key", "sentence"),
    [
        ("cert", "ca", "are not a certificate and its key"),
        ("key", "key", "are not a certificate and its key"),
        ("nowhere", "key", "nowhere cannot be read: no such file or directory"),
    ],
)
def test_invalid_files_are_refused(files: Files, cert: str, key: str, sentence: str) -> None:
    paths = {"cert": files.cert, "key": files.key, "ca": files.ca, "nowhere": files.cert.with_name("nowhere")}
    with pytest.raises(ConfigurationError, match=sentence):
        server_credentials(paths[cert], paths[key])


def test_a_system_without_files_in_memory(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    server_credentials(files.cert, files.key, files.ca)
    with pytest.raises(ConfigurationError, match="holds no certificate"):
        server_credentials(files.cert, files.key, files.key)

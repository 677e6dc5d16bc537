"""The methods that each token allows, servers that must be protected, and certificates that expire."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from tandem.config.settings import ServerSettings
from tandem.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from tandem.rpc.channels import open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.serving.protection import (
    WARNING_TIME,
    Scope,
    Tokens,
    authorize,
    parse_tokens,
    scope_of,
    server_credentials,
    token_source,
    warn_of_expiry,
)
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tests.certificates import Files, issued
from tests.unit.tandem.serving.served import Scripted, health_of, refusal, running, texts_from, texts_on

CLIENT = "the-token-of-clients"
ADMIN = "the-token-of-admins"
BOTH = Tokens((CLIENT,), (ADMIN,))
ONLY_CLIENT = Tokens((CLIENT,))
ONLY_ADMIN = Tokens((), (ADMIN,))
SHUT = Tokens()
OPEN = Tokens(admin_needs_token=False)


@pytest.mark.parametrize(
    ("tokens", "scope", "shown", "refusal"),
    [
        (BOTH, Scope.OPEN, None, None),
        (BOTH, Scope.CLIENT, None, UnauthenticatedError),
        (BOTH, Scope.CLIENT, CLIENT, None),
        (BOTH, Scope.CLIENT, ADMIN, None),
        (BOTH, Scope.CLIENT, "another", UnauthenticatedError),
        (BOTH, Scope.ADMIN, None, UnauthenticatedError),
        (BOTH, Scope.ADMIN, CLIENT, PermissionDeniedError),
        (BOTH, Scope.ADMIN, ADMIN, None),
        (ONLY_CLIENT, Scope.ADMIN, CLIENT, PermissionDeniedError),
        (ONLY_CLIENT, Scope.ADMIN, None, PermissionDeniedError),
        (ONLY_ADMIN, Scope.CLIENT, None, None),
        (ONLY_ADMIN, Scope.ADMIN, None, UnauthenticatedError),
        (SHUT, Scope.CLIENT, None, None),
        (SHUT, Scope.ADMIN, None, PermissionDeniedError),
        (OPEN, Scope.ADMIN, None, None),
    ],
)
def test_each_token_allows_its_methods(
    tokens: Tokens, scope: Scope, shown: str | None, refusal: type[Exception] | None
) -> None:
    header = None if shown is None else f"Bearer {shown}"
    if refusal is None:
        authorize(scope, header, tokens)
    else:
        with pytest.raises(refusal) as error:
            authorize(scope, header, tokens)
        assert not {CLIENT, ADMIN} & set(str(error.value).split())


@pytest.mark.parametrize(
    "header", ["", "Bearer ", CLIENT, f"Basic {CLIENT}", f"Bearer {CLIENT} x", "bearer another"]
)
def test_headers_that_hold_no_known_token(header: str) -> None:
    authorize(Scope.CLIENT, f"bearer {CLIENT}", BOTH)
    with pytest.raises(UnauthenticatedError):
        authorize(Scope.CLIENT, header, BOTH)


@pytest.mark.parametrize(
    ("method", "scope"),
    [
        ("/grpc.health.v1.Health/Watch", Scope.OPEN),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Scope.CLIENT),
        ("/tandem.v1.GenerationService/Generate", Scope.CLIENT),
        ("/tandem.v1.TargetService/Verify", Scope.CLIENT),
        ("/tandem.v1.AdminService/Anything", Scope.ADMIN),
        ("/tandem.v1.AdminServiceX/Anything", Scope.CLIENT),
        ("/unheard.of/Method", Scope.CLIENT),
    ],
)
def test_each_method_requires_its_token(method: str, scope: Scope) -> None:
    assert scope_of(method) is scope


@pytest.mark.parametrize(
    ("options", "admin_needs_token"),
    [({}, False), ({"auth_token": CLIENT}, True), ({"host": "0.0.0.0", "insecure": True}, True)],
)
def test_admin_calls_need_a_token_unless_this_machine_is_alone(
    options: dict[str, object], admin_needs_token: bool
) -> None:
    settings = ServerSettings.model_validate(options)
    assert token_source(settings, settings.host)().admin_needs_token is admin_needs_token


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no token"),
        (b"\n \n", "holds no token"),
        (b"short", "has 5 characters; it must have at least 16"),
        (b"two words in one line", "not one word of visible ASCII"),
        ("ein-längeres-geheimnis".encode(), "not one word of visible ASCII"),
    ],
)
def test_files_without_a_token(content: bytes, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as error:
        parse_tokens(content, "the file")
    assert not content.strip() or content.decode() not in str(error.value)


TLS = {"tls_cert_file": "cert.pem", "tls_key_file": "key.pem"}


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "give tls_cert_file and tls_key_file, and auth_token_file or tls_client_ca_file; or insecure"),
        (TLS, "give auth_token_file or tls_client_ca_file; or insecure"),
        ({"auth_token": CLIENT}, "give tls_cert_file and tls_key_file; or insecure"),
        (TLS | {"auth_token": CLIENT}, None),
        ({"host": "127.1.2.3"}, None),
        ({"host": "::1"}, None),
        ({"host": "localhost"}, None),
        (TLS | {"auth_token_file": "tokens"}, None),
        (TLS | {"tls_client_ca_file": "ca.pem"}, None),
        ({"insecure": True}, None),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_a_reachable_server_is_protected(host: str, options: dict[str, object], missing: str | None) -> None:
    if missing is None:
        ServerSettings.model_validate({"host": host} | options)
    else:
        with pytest.raises(ValidationError) as error:
            ServerSettings.model_validate({"host": host} | options)
        assert f"host is {host}" in str(error.value)
        assert missing in str(error.value)


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({"target_address": "10.0.0.1:1"}, True),
        ({"target_address": "127.0.0.1:1,target:1"}, True),
        ({"target_address": "127.0.0.1:1", "draft_address": "draft:1"}, True),
        ({"target_address": "127.0.0.1:1,localhost:1,[::1]:1,unix:/target"}, False),
        ({"target_address": "target:1", "service_tls_ca_file": "ca.pem"}, False),
        ({"target_address": "target:1", "service_tls": True}, False),
        ({"target_address": "target:1", "insecure": True}, False),
    ],
)
def test_prompts_do_not_cross_a_network_in_plain_text(options: dict[str, object], is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(
            ValidationError, match="another machine, and prompts would go there in plain text"
        ):
            CoordinatorSettings.model_validate(options)
    else:
        CoordinatorSettings.model_validate(options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tls_cert_file": "c"}, "tls_key_file is not set"),
        ({"tls_client_ca_file": "c"}, "it needs tls_cert_file and tls_key_file"),
        ({"auth_token": "short"}, "auth_token has 5 characters"),
        ({"auth_token": CLIENT, "auth_token_file": "f"}, "auth_token and auth_token_file are both set"),
        ({"admin_token": "short"}, "admin_token has 5 characters"),
        ({"auth_token": 1234567890123456789}, "it must be a text"),
        ({"http_port": 0, "http_host": "0.0.0.0"}, "http_host is 0.0.0.0, which other machines reach"),
        (
            {"prometheus_port": 0, "prometheus_host": "0.0.0.0"},
            "prometheus_host is 0.0.0.0, which other machines",
        ),
        ({"cors_origin": "chat.example"}, "cors_origin is chat.example; it must be"),
        ({"http_max_held_body_bytes": 4096}, "http_max_held_body_bytes is 4096; it must be at least"),
    ],
)
def test_conflicting_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence) as error:
        CoordinatorSettings.model_validate({"target_address": "127.0.0.1:1"} | options)
    assert "1234567890123456789" not in "".join(detail["msg"] for detail in error.value.errors())


def test_tokens_are_never_shown() -> None:
    settings = CoordinatorSettings.model_validate(
        {"target_address": "127.0.0.1:1", "auth_token": CLIENT, "admin_token": ADMIN, "service_token": CLIENT}
    )
    shown = [repr(settings), str(settings.model_dump(mode="json")), settings.model_dump_json()]
    shown += [repr(settings.service_credentials), repr(Credentials(token=CLIENT)), repr(BOTH)]
    assert not any(token in text for text in shown for token in (CLIENT, ADMIN))
    assert settings.service_credentials.token == CLIENT


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


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
    right = Credentials(ca_file=files.ca, token=CLIENT)
    refused = {
        "no token": (replace(right, token=""), UNAUTHENTICATED, "has no token"),
        "wrong token": (replace(right, token=CLIENT + "x"), UNAUTHENTICATED, "is not known"),
        "another authority": (replace(right, ca_file=strangers.ca), UNAVAILABLE, ""),
        "another name": (replace(right, server_name="example.org"), UNAVAILABLE, ""),
        "plain text": (Credentials(token=CLIENT), UNAVAILABLE, ""),
    }
    async with running(Scripted(), capsys, **tls_options(files), auth_token=CLIENT) as address:
        assert await texts_from(address, right) == ["hello"]
        for case, (credentials, code, words) in refused.items():
            error = await refusal(address, credentials)
            assert error.code() is code, case
            assert words in (error.details() or ""), case
            assert CLIENT not in (error.details() or ""), case
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
    async with running(Scripted(), capsys, auth_token=CLIENT) as address:
        assert await health_of(address) == "SERVING"
        for credentials, code in ((PLAIN, UNAUTHENTICATED), (Credentials(token=CLIENT), None)):
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
    async with running(Scripted(), capsys, **tls_options(served), auth_token=CLIENT) as address:
        before = Credentials(ca_file=first.ca, token=CLIENT)
        after = Credentials(ca_file=served.ca, token=CLIENT)
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
    served = issued(tmp_path / "served")
    next_ = issued(tmp_path / "next")
    before = Credentials(ca_file=tmp_path / "before.pem", token=CLIENT)
    (tmp_path / "before.pem").write_bytes(served.ca.read_bytes())
    async with running(Scripted(), capsys, **tls_options(served), auth_token=CLIENT) as address:
        served.cert.touch()
        renew_once_half_is_read(monkeypatch, served, next_)
        assert await texts_from(address, before) == ["hello"], (
            "the old pair holds while the new one is half read"
        )
        assert await texts_from(address, Credentials(ca_file=served.ca, token=CLIENT)) == ["hello"]


async def test_renewed_tokens_apply_to_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = tmp_path / "served"
    shown = tmp_path / "shown"
    served.write_text(f"{CLIENT}\n", encoding="utf-8")
    shown.write_text(CLIENT, encoding="utf-8")
    new = "a-token-that-is-new"
    async with (
        running(Scripted(), capsys, auth_token_file=served) as address,
        open_channel(address, credentials=Credentials(token_file=shown)) as channel,
    ):
        assert await texts_on(channel) == ["hello"]
        served.write_text(f"{CLIENT}\n{new}\n", encoding="utf-8")
        assert await texts_on(channel) == ["hello"], "both hold while they are exchanged"
        shown.write_text(new, encoding="utf-8")
        assert await texts_on(channel) == ["hello"]
        served.write_text(f"{new}\n", encoding="utf-8")
        assert await texts_on(channel) == ["hello"]
        assert (await refusal(address, Credentials(token=CLIENT))).code() is UNAUTHENTICATED
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


NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "tandem.serving.protection"]


async def test_a_server_warns_at_startup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(
        Scripted(), capsys, **tls_options(issued(tmp_path, trustme.CA(), not_after=NOW + DAY))
    ):
        assert words(caplog) == ["certificate expires soon"]


def test_the_warning_comes_daily_and_at_expiry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = issued(tmp_path, trustme.CA(), not_after=NOW + 1.5 * DAY).cert
    assert warn_of_expiry([path], NOW - WARNING_TIME) == DAY
    assert words(caplog) == []
    seen = []
    now = NOW
    while now < NOW + 4 * DAY:
        now += warn_of_expiry([path], now)
        seen += words(caplog)
        caplog.clear()
    assert seen == ["certificate expires soon"] * 2 + ["certificate has expired"] * 3
    issued(tmp_path, trustme.CA(), not_after=NOW + 90 * DAY)
    assert warn_of_expiry([path], NOW + 5 * DAY) == DAY
    assert words(caplog) == [], "it was renewed"


def test_an_unreadable_certificate_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "no.pem").write_text("nothing", encoding="utf-8")
    assert warn_of_expiry([tmp_path / "no.pem", tmp_path / "none.pem"], NOW) == DAY
    assert words(caplog) == []

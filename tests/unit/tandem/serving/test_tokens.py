"""The methods that each token allows, and servers that must be protected."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from coordinator.settings.coordinator import CoordinatorSettings
from tandem.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from tandem.rpc.credentials import Credentials
from tandem.serving.protection import token_source
from tandem.serving.tokens import Scope, Tokens, authorize, parse_tokens, scope_of
from tandem.settings import ServerSettings

CLIENT, ADMIN = "the-token-of-clients", "the-token-of-admins"
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


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", CLIENT, f"Basic {CLIENT}", f"Bearer {CLIENT} x"])
def test_headers_that_hold_no_token(header: str) -> None:
    with pytest.raises(UnauthenticatedError):
        authorize(Scope.CLIENT, header, BOTH)


def test_the_scheme_is_spelled_any_way() -> None:
    authorize(Scope.CLIENT, f"bearer {CLIENT}", BOTH)
    with pytest.raises(UnauthenticatedError):
        authorize(Scope.CLIENT, "bearer another", BOTH)


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
    [
        ({}, False),
        ({"auth_token": CLIENT}, True),
        ({"host": "0.0.0.0", "insecure": True}, True),
    ],
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
        (TLS | {"auth_token_file": "tokens"}, None),
        (TLS | {"tls_client_ca_file": "ca.pem"}, None),
        ({"insecure": True}, None),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_a_server_that_others_reach_is_protected(
    host: str, options: dict[str, object], missing: str | None
) -> None:
    if missing is None:
        ServerSettings.model_validate({"host": host} | options)
    else:
        with pytest.raises(ValidationError) as error:
            ServerSettings.model_validate({"host": host} | options)
        assert f"host is {host}" in str(error.value)
        assert missing in str(error.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_protection(host: str) -> None:
    assert ServerSettings(host=host).host == host


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

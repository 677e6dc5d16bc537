"""Scopes of callers: who is told apart from whom, and which coordinators agree."""

from __future__ import annotations

from tandem.rpc.credentials import Credentials
from tandem.serving.scopes import MAX_SCOPE_LENGTH, PREFIX, SUFFIX, CallerScopes

SERVICES = Credentials(token="the-token-of-the-services")
CALLER = "the-token-of-a-caller"


def test_tokens_and_salts_are_told_apart_and_no_token_can_be_read() -> None:
    scopes = CallerScopes(SERVICES)
    made = [
        scopes.of(token=CALLER),
        scopes.of(token=CALLER, salt="a"),
        scopes.of(token="the-token-of-another"),
        scopes.of(address=CALLER),
        scopes.of(),
        scopes.of(),
    ]
    prefixes = [each.prefix for each in made]
    assert len(set(prefixes)) == len(prefixes)
    assert all(0 < len(prefix) <= MAX_SCOPE_LENGTH and CALLER not in prefix for prefix in prefixes)
    assert made[-1].suffix == "", "an unknown caller leaves nothing behind"
    assert scopes.of(token=CALLER) == made[0]


def test_coordinators_agree_on_a_token_by_the_services_token_alone() -> None:
    first = CallerScopes(SERVICES)
    assert CallerScopes(SERVICES).of(token=CALLER) == first.of(token=CALLER)
    other = Credentials(token="another-token-of-services")
    assert CallerScopes(other).of(token=CALLER) != first.of(token=CALLER)
    assert CallerScopes().of(token=CALLER) != CallerScopes().of(token=CALLER)


def test_an_address_is_a_caller_of_one_coordinator() -> None:
    """127.0.0.1 is somebody else on each machine."""
    first = CallerScopes(SERVICES)
    assert first.of(address="127.0.0.1") == first.of(address="127.0.0.1")
    assert CallerScopes(SERVICES).of(address="127.0.0.1") != first.of(address="127.0.0.1")


def test_the_operator_shares_one_kind_and_a_salt_stays_apart() -> None:
    shared = CallerScopes(SERVICES, [SUFFIX])
    one = shared.of(token=CALLER)
    other = shared.of(token="the-token-of-another")
    assert one.suffix == other.suffix
    assert one.prefix != other.prefix
    assert shared.of(token=CALLER, salt="a").suffix != one.suffix
    both = CallerScopes(SERVICES, [SUFFIX, PREFIX])
    assert both.of(token=CALLER) == both.of(address="10.0.0.1")

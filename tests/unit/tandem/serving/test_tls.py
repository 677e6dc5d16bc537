"""The log warns of certificates that have expired or will expire soon."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from tandem.serving.tls import WARNING_TIME, warn_of_expiry
from tests.certificates import issued
from tests.unit.tandem.serving.served import Scripted, running

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def issue(folder: Path, ends: datetime) -> dict[str, object]:
    """Options for a server whose certificate ends then."""
    files = issued(folder, trustme.CA(), not_after=ends)
    return {"tls_cert_file": files.cert, "tls_key_file": files.key}


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "tandem.serving.tls"]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (NOW - DAY, ["certificate has expired"]),
        (NOW + DAY, ["certificate expires soon"]),
        (NOW + WARNING_TIME + DAY, []),
    ],
)
async def test_a_server_warns_at_startup(
    ends: datetime,
    expected: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running(Scripted(), capsys, **issue(tmp_path, ends)):
        assert words(caplog) == expected


def test_the_warning_is_repeated_daily_and_at_expiry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = issued(tmp_path, trustme.CA(), not_after=NOW + 1.5 * DAY).cert
    seen, now = [], NOW
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

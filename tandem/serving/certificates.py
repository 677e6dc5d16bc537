"""Logs the expiry of certificates in time, before handshakes fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

WARNING_TIME = timedelta(days=14)
"""Time before its expiry at which warnings about a certificate begin. Automatic renewal replaces certificates of 90
days after two thirds of that time, so healthy ones cause no warnings."""
_CHECK_SECONDS = 3600.0
_REPEAT_TIME = timedelta(days=1)


async def watch_expiry(paths: Sequence[Path]) -> None:
    """Warn of certificates that have expired or soon will: at once, and once a day. Never returns.

    Args:
        paths: PEM files, read again each time: they may have been renewed.
    """
    expiry_log = ExpiryLog(paths)
    while True:
        expiry_log.look(datetime.now(UTC))
        await asyncio.sleep(_CHECK_SECONDS)


class ExpiryLog:
    """Warns about each file at most once a day, and when it expires."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._told: dict[Path, tuple[bool, datetime]] = {}

    def look(self, now: datetime) -> None:
        """Log the warnings of this moment."""
        for path in self._paths:
            try:
                ends = end_of(path.read_bytes(), path)
            except (OSError, ConfigurationError):
                continue  # using the file reports this
            has_expired = ends <= now
            if ends - now > WARNING_TIME:
                self._told.pop(path, None)
                continue
            was_expired, told_at = self._told.get(path, (False, datetime.min.replace(tzinfo=UTC)))
            if now - told_at < _REPEAT_TIME and was_expired == has_expired:
                continue
            self._told[path] = (has_expired, now)
            logger.log(
                logging.ERROR if has_expired else logging.WARNING,
                "certificate has expired" if has_expired else "certificate expires soon",
                extra={
                    "file": str(path),
                    "ends": ends.isoformat(),
                    "days": (ends - now) // timedelta(days=1),
                },
            )


def end_of(pem: bytes, path: Path) -> datetime:
    """The moment at which the first certificate of a PEM file's chain expires.

    Raises:
        ConfigurationError: the file holds no certificate.
    """
    # Imported here, so that it is loaded only with TLS.
    from cryptography import x509

    try:
        return min(certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(pem))
    except ValueError:
        raise ConfigurationError(f"{path} holds no certificate; it must be PEM") from None

"""Certificates made for a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Files:
    """PEM files of one authority and of a certificate that it signed for this machine."""

    ca: Path
    cert: Path
    key: Path


def issued(
    folder: Path,
    authority: trustme.CA | None = None,
    not_after: datetime | None = None,
    names: Sequence[str] = (),
) -> Files:
    """Create a certificate for these names, localhost and 127.0.0.1, by default of a new authority."""
    authority = authority or trustme.CA()
    folder.mkdir(parents=True, exist_ok=True)
    certificate = authority.issue_cert(*names, "localhost", "127.0.0.1", not_after=not_after)
    files = Files(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    authority.cert_pem.write_to_path(files.ca)
    certificate.private_key_pem.write_to_path(files.key)
    files.cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    return files
